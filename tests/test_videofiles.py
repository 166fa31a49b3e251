from pathlib import Path

import numpy as np
import pytest
from video_files import moving, save, save_sound, trim, turn

from sagecli.errors import UserError
from sagecli.videofiles import UnreadableVideoError, VideoInfo, find_videos, probe, read_frames


@pytest.mark.parametrize(
    ("name", "codec", "pix_fmt"),
    [
        ("a.mp4", "libx264", "yuv420p"),
        ("a.mkv", "libx265", "yuv420p10le"),
        ("a.webm", "libvpx-vp9", "yuv420p"),
        ("a.mov", "prores_ks", "yuv422p10le"),
        ("a.avi", "mpeg4", "yuv420p"),
        ("a.gif", "gif", "rgb8"),
    ],
)
@pytest.mark.parametrize("count", [1, 9])
def test_every_container_gives_the_frames_asked_for(tmp_path, name, codec, pix_fmt, count):
    frames = moving(count)
    path = save(tmp_path / name, frames, codec, pix_fmt, sound="aac" if name == "a.mp4" else "")
    info = probe(path)
    assert (info.num_frames, info.height, info.width) == (count, 48, 64)
    if count > 1:
        assert info.fps == pytest.approx(8, rel=1e-3)
    wanted = [count - 1, 0, count // 2, 0]
    read = read_frames(path, wanted).permute(0, 2, 3, 1).numpy()
    for number, pixels in zip(wanted, read, strict=True):
        nearest = np.abs(frames.astype(float) - pixels).mean((1, 2, 3))
        assert int(nearest.argmin()) == number
        assert nearest.min() < (20 if name == "a.gif" else 6)


def test_lossless_frames_are_exact_at_odd_sizes(tmp_path):
    frames = moving(4, 33, 47)
    path = save(tmp_path / "odd.mkv", frames, "ffv1", "bgr0")
    assert probe(path) == VideoInfo(4, 8.0, 33, 47)
    assert np.array_equal(read_frames(path, [0, 3]).permute(0, 2, 3, 1).numpy(), frames[[0, 3]])


def test_a_variable_rate_counts_frames_and_measures_their_rate(tmp_path):
    path = save(tmp_path / "v.mkv", moving(5), "ffv1", "bgr0", times=[0, 10, 500, 600, 2000])
    info = probe(path)
    assert info.num_frames == 5
    assert info.fps == pytest.approx(4 / 2.0, rel=1e-3)


def test_a_variable_rate_in_avi_is_not_taken_for_a_cut_file(tmp_path):
    path = save(tmp_path / "v.avi", moving(5), "mpeg4", times=[0, 125, 500, 625, 2000])
    assert probe(path).num_frames == 5


def test_a_trimmed_mp4_is_whole_and_read_as_it_is_shown(tmp_path):
    frames = moving(40)
    path = save(tmp_path / "t.mp4", frames, "mpeg4")  # with a key frame every 12
    trim(path, start=26, count=8)
    assert probe(path).num_frames == 8
    shown = read_frames(path, [0, 7]).permute(0, 2, 3, 1).numpy()
    for number, pixels in zip((26, 33), shown, strict=True):
        assert int(np.abs(frames.astype(float) - pixels).mean((1, 2, 3)).argmin()) == number


def test_a_turned_video_is_read_as_it_is_shown(tmp_path):
    frames = moving(3)
    path = save(tmp_path / "t.mp4", frames)
    plain = read_frames(path, [0, 1, 2])
    turn(path)
    assert probe(path) == VideoInfo(3, 8.0, 64, 48)
    shown = read_frames(path, [0, 1, 2])
    # a quarter clockwise: the left column becomes the top row
    assert np.array_equal(shown.numpy(), np.rot90(plain.numpy(), -1, axes=(2, 3)))


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
def test_titles_in_any_encoding_and_names_with_a_colon_are_read(tmp_path, monkeypatch, suffix):
    path = save(tmp_path / f"12:30.{suffix}", moving(3), title="CAF#")
    path.write_bytes(path.read_bytes().replace(b"CAF#", b"CAF\xe9"))
    assert b"CAF\xe9" in path.read_bytes()
    monkeypatch.chdir(tmp_path)
    assert probe(Path(path.name)).num_frames == 3
    assert read_frames(Path(path.name), [2]).shape == (1, 3, 48, 64)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:700]), "it is no video, or is cut short"),
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_text("no video at all\n" * 200), "it is no video, or is cut short"),
        (lambda path: path.unlink(), "there is no such file"),
        (save_sound, "it has no video stream, only sound"),
    ],
)
def test_what_cannot_be_decoded_says_why(tmp_path, spoil, reason):
    path = save(tmp_path / "a.mp4", moving(9))
    spoil(path)
    with pytest.raises(UnreadableVideoError, match=reason):
        probe(path)


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.avi", "mpeg4", {}),
        ("a.mkv", "libx264", {}),
        ("a.webm", "libvpx-vp9", {}),
        ("a.gif", "gif", {}),
        ("a.mp4", "mpeg4", {"movflags": "faststart"}),
        ("a.mp4", "mpeg4", {"movflags": "frag_keyframe+empty_moov"}),
    ],
)
def test_a_file_cut_within_its_frames_is_not_taken_for_a_shorter_one(tmp_path, name, codec, options):
    """With sound, which lasts longer than the frames, where the container takes it."""
    sound = {"a.avi": "mp3", "a.mkv": "aac", "a.mp4": "aac"}.get(name, "")
    path = save(tmp_path / name, moving(30), codec, "rgb8" if codec == "gif" else "yuv420p", 8, sound=sound, **options)
    assert probe(path).num_frames == 30
    whole = path.read_bytes()
    for part in (0.5, 0.7, 0.9, 0.95):
        path.write_bytes(whole[: int(len(whole) * part)])
        if part < 0.95 or name != "a.avi":  # there its index alone is missing
            with pytest.raises(UnreadableVideoError, match=r"cut short|breaks off"):
                probe(path)


def test_live_recordings_say_no_length_and_are_read_as_they_are(tmp_path):
    path = save(tmp_path / "a.mkv", moving(5), live="1")
    assert probe(path).num_frames == 5


def test_bytes_after_the_end_are_nothing_missing(tmp_path):
    for name, codec, pix_fmt in (("a.mp4", "mpeg4", "yuv420p"), ("a.gif", "gif", "rgb8"), ("a.mkv", "ffv1", "bgr0")):
        path = save(tmp_path / name, moving(5), codec, pix_fmt)
        path.write_bytes(path.read_bytes() + b"\xff\xfe\x00\x01" * 9)
        assert probe(path).num_frames == 5


def test_paths_name_videos_once_and_in_order(tmp_path):
    (tmp_path / "inner").mkdir()
    names = ["b.mp4", "a.MP4", "inner/c.webm", ".a.partial.mp4", "notes.txt"]
    for name in names:
        (tmp_path / name).touch()
    found = find_videos([str(tmp_path)])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a.MP4", "b.mp4", "inner/c.webm"]
    assert find_videos([str(tmp_path / "b.mp4"), str(tmp_path)])[0] == tmp_path / "b.mp4"
    assert find_videos([f"{tmp_path}/**/*.webm"]) == [tmp_path / "inner/c.webm"]
    (tmp_path / "picture.png").touch()
    assert find_videos([f"{tmp_path}/*"]) == [tmp_path / name for name in ("a.MP4", "b.mp4", "inner/c.webm")]
    (tmp_path / "again").symlink_to(tmp_path / "inner")
    (tmp_path / "inner" / "loop").symlink_to(tmp_path)
    assert find_videos([str(tmp_path / "again"), str(tmp_path / "inner" / "c.webm")])[0] == tmp_path / "again/c.webm"
    assert len(find_videos([str(tmp_path / "again"), str(tmp_path)])) == 3
    (tmp_path / "manifest.jsonl").write_text('{"file": "b.mp4", "prompt": "x"}\n')
    assert find_videos([str(tmp_path / "manifest.jsonl")]) == [tmp_path / "b.mp4"]


def test_paths_that_name_none_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file or folder, and no file matches it"):
        find_videos([str(tmp_path / "nothing*.mp4")])
    with pytest.raises(UserError, match=r"no video in it; videos end in \.mp4"):
        find_videos([str(tmp_path)])
