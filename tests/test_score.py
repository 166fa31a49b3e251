"""`sage score` on files of every kind."""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from score_rows import rows
from video_files import moving, save, save_sound

from sagecli.rewards.clip import ClipScore
from sagecli.rewards.videoalign import VideoAlign
from sagecli.videofiles import read_frames


@torch.no_grad()
def test_scores_are_those_of_the_reward_on_the_files_frames(sage, clips, align, tmp_path):
    out = tmp_path / "s.jsonl"
    result = sage("score", str(clips), "--reward", "videoalign", "--path", align, "--out", str(out))
    assert result.code == 0, result.err
    assert "3 of 3 videos scored" in result.out
    assert "75 of 75 keys" in result.out
    reward = VideoAlign(align)
    reward.load()
    for row, name, total in zip(rows(out), ("a.mp4", "b.mp4", "c.mkv"), (9, 9, 6), strict=True):
        assert (row["video"], row["num_frames"], row["fps"]) == (str(clips / name), total, 8.0)
        assert row["prompt"] == f"a square number {name[0]}"
        whole = read_frames(clips / name, range(total))[None].float() / 255
        expected = reward(whole, [row["prompt"]], 8.0)
        for axis, value in expected.axes.items():
            assert row["scores"][axis] == pytest.approx(float(value), abs=1e-5)
        detail = row["videoalign"]
        assert detail["frames"] == reward.frames(total, 8.0)
        assert detail["raw"]["TA"] == pytest.approx(expected.details[0]["raw"]["TA"], abs=1e-5)
        assert (detail["model"], detail["template_sha256"]) == (
            f"{align}/checkpoint-7",
            expected.details[0]["template_sha256"],
        )
        assert row["overall"] == pytest.approx(sum(row["scores"].values()))


def test_a_table_shows_means_overall_and_the_weighted_reward(sage, clips, align, tmp_path):
    out = tmp_path / "s.jsonl"
    weights = ("--weights", "VQ=0.5,MQ=0.5,TA=1")
    result = sage("score", str(clips), "--reward", "videoalign", "--path", align, *weights, "--out", str(out))
    assert result.code == 0, result.err
    scored = [row["scores"] for row in rows(out)]
    expected = [0.5 * row["VQ"] + 0.5 * row["MQ"] + row["TA"] for row in scored]
    assert [row["reward"] for row in rows(out)] == pytest.approx(expected)
    for name, values in (("VQ", [row["VQ"] for row in scored]), ("weighted reward", expected)):
        mean = torch.tensor(values, dtype=torch.float64).mean()
        std = torch.tensor(values, dtype=torch.float64).std(correction=0)
        line = next(line for line in result.out.splitlines() if f"│ {name}" in line)
        assert f"{float(mean):.4f}" in line
        assert f"{float(std):.4f}" in line
    assert "Overall (VQ + MQ + TA)" in result.out


def test_rewards_and_weights_of_a_preset(sage, clips, align, clip, tmp_path):
    from sagecli.loading import preset_text

    preset = tmp_path / "mine.toml"
    text = preset_text("setting-b").replace('name = "videoalign"\npath = ""', f'name = "videoalign"\npath = "{align}"')
    preset.write_text(text.replace('dtype = "bfloat16" # [code]', 'dtype = "float32"'))
    out = tmp_path / "s.jsonl"
    result = sage("score", str(clips), "--preset", str(preset), "--out", str(out))
    assert result.code == 0, result.err
    for row in rows(out):
        assert row["reward"] == pytest.approx(
            0.5 * row["scores"]["VQ"] + 0.5 * row["scores"]["MQ"] + row["scores"]["TA"]
        )
    result = sage("score", str(clips), "--preset", str(preset), "--reward", "clip", "--path", clip)
    assert result.code == 0, result.err
    assert "CLIPScore" in result.out
    assert "weighted reward" not in result.out


def test_several_rewards_in_csv_and_their_options(sage, clips, clip, align, tmp_path):
    out = tmp_path / "s.csv"
    more = ("--reward", "clip", "--path", f"clip={clip}", "--option", "clip.frames=3", "--option", "clip.scale=cosine")
    other = (
        "--reward",
        "pickscore",
        "--path",
        f"pickscore={clip}",
        "--reward",
        "videoalign",
        "--path",
        f"videoalign={align}",
    )
    result = sage("score", str(clips), *more, *other, "--out", str(out))
    assert result.code == 0, result.err
    with out.open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [Path(row["video"]).name for row in table] == ["a.mp4", "b.mp4", "c.mkv"]
    assert [row["clip.frames"] for row in table] == ["[0, 4, 8]", "[0, 4, 8]", "[0, 2, 5]"]
    for row in table:
        assert float(row["scores.CLIPScore"]) == pytest.approx(float(row["clip.raw.CLIPScore"]))
        assert row["clip.scale"] == "cosine"
        assert row["videoalign.template_known"] == "false"
        assert abs(float(row["scores.PickScore"])) < 1


def test_what_rollout_wrote_is_scored_with_its_own_prompts(sage, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("a small red circle moving left fast\na large blue square moving up slowly\n")
    out = tmp_path / "out"
    options = ("--videos-per-prompt", "2", "--reward", "shapes", "--out", str(out), "--set", "sampler.steps=3")
    assert sage("rollout", "--model", "tiny", "--prompts", str(prompts), *options).code == 0
    for source, name in ((out, "whole.jsonl"), (out / "manifest.jsonl", "listed.jsonl")):
        result = sage("score", str(source), "--reward", "shapes", "--out", str(tmp_path / name))
        assert result.code == 0, result.err
        for row, made in zip(rows(tmp_path / name), rows(out / "manifest.jsonl"), strict=True):
            assert (Path(row["video"]).name, row["prompt"]) == (made["file"], made["prompt"])
            for axis, value in made["scores"].items():  # from memory there, from H.264 here
                assert row["scores"][axis] == pytest.approx(value, abs=0.05)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.csv", '\ufeffvideo,prompt,note\r\na.mp4,"a square, lit",x\r\n\r\n{folder}/b.mp4,two,y\r\n'),
        (
            "map.jsonl",
            '{"video": "a.mp4", "prompt": "a square, lit"}\r\n\r\n{"video": "{folder}/b.mp4", "prompt": "two"}',
        ),
    ],
)
def test_prompts_of_a_map_and_of_one_for_all(sage, clips, clip, tmp_path, name, text):
    for beside in clips.glob("*.txt"):
        beside.unlink()
    (tmp_path / name).write_text(text.replace("{folder}", str(clips)), encoding="utf-8", newline="")
    given = ("--prompts", str(tmp_path / name), "--prompt", "the rest")
    out = tmp_path / "s.jsonl"
    result = sage("score", str(clips), "--reward", "clip", "--path", clip, *given, "--out", str(out))
    assert result.code == 0, result.err
    assert [row["prompt"] for row in rows(out)] == ["a square, lit", "two", "the rest"]


def test_videos_without_prompts_are_listed_before_anything_is_loaded(sage, clips, clip, monkeypatch):
    (clips / "b.txt").write_text("\n \n")
    (clips / "c.txt").unlink()
    monkeypatch.setattr(ClipScore, "load", lambda self: pytest.fail("loaded"))
    result = sage("score", str(clips), "--reward", "clip", "--path", clip)
    assert result.code == 2
    assert "clip needs prompts, and 2 of 3 videos have none" in result.err
    assert "b.mp4" in result.err
    assert "c.mkv" in result.err
    assert "a.mp4" not in result.err


def test_long_prompts_are_counted(sage, clips, clip):
    (clips / "a.txt").write_text("x" * 90)
    (clips / "b.txt").write_text("y" * 90)
    result = sage("score", str(clips), "--reward", "clip", "--path", clip)
    assert "warning: clip: the prompt is longer than 77 tokens; the rest was not read (2 prompts)" in result.out


BROKEN = {
    "cut.mp4": (
        lambda path: path.write_bytes(save(path, moving(9)).read_bytes()[:900]),
        "it is no video, or is cut short",
    ),
    "empty.mp4": (lambda path: path.write_bytes(b""), "the file is empty"),
    "text.mp4": (lambda path: path.write_text("a letter\n" * 99), "it is no video, or is cut short"),
    "sound.mp4": (save_sound, "it has no video stream, only sound"),
}


def test_broken_files_are_named_and_the_others_scored(sage, clips, clip, tmp_path):
    for name, (spoil, _) in BROKEN.items():
        spoil(clips / name)
    out = tmp_path / "s.jsonl"
    options = ("--reward", "clip", "--path", clip, "--prompt", "a square", "--out", str(out))
    result = sage("score", str(clips), *options)
    assert result.code == 1
    assert "3 of 7 videos scored" in result.out
    assert "4 could not be scored" in result.out
    for name, (_, reason) in BROKEN.items():
        assert f"{name}: {reason}" in result.out
    assert [Path(row["video"]).name for row in rows(out)] == ["a.mp4", "b.mp4", "c.mkv"]


def test_a_file_that_changes_while_it_is_read_fails_alone(sage, clips, clip, tmp_path, monkeypatch):
    from sagecli import score

    def shrunk(path: Path) -> Any:
        info = probe(path)
        if path.name == "a.mp4":
            save(path, moving(4))
        return info

    probe = score.probe
    monkeypatch.setattr(score, "probe", shrunk)
    out = tmp_path / "s.jsonl"
    result = sage("score", str(clips), "--reward", "clip", "--path", clip, "--out", str(out))
    assert result.code == 1
    assert "a.mp4: it has no frame 5 any more" in result.out
    assert [Path(row["video"]).name for row in rows(out)] == ["b.mp4", "c.mkv"]


def test_a_manifest_of_another_tool_is_not_read(sage, clips, clip, tmp_path):
    (clips / "manifest.jsonl").write_text('{"version": 3}\n')
    assert sage("score", str(clips), "--reward", "clip", "--path", clip).code == 0
    result = sage("score", str(clips / "manifest.jsonl"), "--reward", "clip", "--path", clip)
    assert (result.code, "no column 'file'; it has version" in result.err) == (2, True)


def test_a_link_is_a_video_of_its_own_and_a_broken_one_is_named(sage, clips, clip, tmp_path):
    (clips / "d.mp4").symlink_to("a.mp4")
    (clips / "d.txt").write_text("another prompt")
    (clips / "e.mp4").symlink_to("gone.mp4")
    (clips / "f.mp4").symlink_to("f.mp4")
    out = tmp_path / "s.jsonl"
    options = ("--reward", "clip", "--path", clip, "--prompt", "x", "--out", str(out))
    result = sage("score", str(clips), str(clips / "f.mp4"), *options)
    assert (result.code, "4 of 6 videos scored" in result.out) == (1, True)
    assert "e.mp4: there is no such file" in result.out
    assert "f.mp4: it is no video, or is cut short (Too many levels of symbolic links)" in result.out
    assert {Path(row["video"]).name: row["prompt"] for row in rows(out)} == {
        "a.mp4": "a square number a",
        "b.mp4": "a square number b",
        "c.mkv": "a square number c",
        "d.mp4": "another prompt",
    }


def test_a_weighted_reward_out_of_range_fails_alone(sage, clips, align, tmp_path):
    plain, out = tmp_path / "plain.jsonl", tmp_path / "s.jsonl"
    options = ("--reward", "videoalign", "--path", align, "--out")
    assert sage("score", str(clips), *options, str(plain)).code == 0
    sizes = sorted(abs(row["scores"]["VQ"]) for row in rows(plain))
    weight = sys.float_info.max / (sizes[-1] + sizes[-2]) * 2  # so that one reward is out of range
    result = sage("score", str(clips), *options, str(out), "--weights", f"VQ={weight}")
    assert (result.code, "2 of 3 videos scored" in result.out) == (1, True)
    assert "its weighted reward is " in result.out
    assert all(math.isfinite(row["reward"]) for row in rows(out))


def test_places_with_a_tilde_that_is_no_home(sage, clips, clip, tmp_path, monkeypatch):
    shutil.move(clips, tmp_path / "~bak")
    monkeypatch.chdir(tmp_path)
    assert sage("score", "./~bak", "--reward", "clip", "--path", clip).code == 0
    result = sage("score", "~nosuchuser/a.mp4", "--reward", "clip", "--path", clip)
    assert (result.code, "~nosuchuser/a.mp4: no such file" in result.err) == (2, True)


def test_a_video_that_a_reward_refuses_fails_alone(sage, clips, tmp_path):
    out = tmp_path / "s.jsonl"
    (clips / "a.txt").write_text("a small red circle moving left fast")
    (clips / "b.txt").write_text("a horse")
    (clips / "c.txt").write_text("a large blue square moving up slowly")
    result = sage("score", str(clips), "--reward", "shapes", "--out", str(out))
    assert result.code == 1
    assert "b.mp4: shapes: the shapes reward cannot read 'a horse'" in result.out
    assert [Path(row["video"]).name for row in rows(out)] == ["a.mp4", "c.mkv"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "name a reward with --reward; installed: clip, pickscore, shapes, videoalign"),
        (
            ("--reward", "clap"),
            "no reward is called 'clap'; installed: clip, pickscore, shapes, videoalign; did you mean 'clip'",
        ),
        (
            ("--reward", "videoalign", "--weights", "VQ=1,MG=2"),
            "no reward here has the axis 'MG'; there are VQ, MQ, TA; did",
        ),
        (("--reward", "videoalign", "--weights", "VQ"), "it takes AXIS=NUMBER, with commas between"),
        (("--reward", "videoalign", "--weights", "VQ=nan"), "it takes AXIS=NUMBER, with commas between"),
        (("--reward", "videoalign", "--weights", "VQ=1,VQ=2"), "VQ stands there twice"),
        (("--reward", "clip", "--option", "clip.name=shapes"), "the reward 'clip' has no option 'name'"),
        (("--reward", "clip", "--option", "clip.frame=3"), "the reward 'clip' has no option 'frame'; its options are"),
        (("--reward", "clip", "--option", "clip.frames=0"), "frames = 0: input should be greater than or equal to 1"),
        (
            ("--reward", "clip", "--option", "clip.dtype=half"),
            "--option clip.dtype = 'half': input should be 'float32'",
        ),
        (("--reward", "clip", "--option", "frames=3"), "--option frames=3: it takes NAME.KEY=VALUE"),
        (
            ("--reward", "shapes", "--option", "shapes.dtype=float16"),
            "the reward 'shapes' has no option 'dtype'; it has none",
        ),
        (("--reward", "shapes", "--reward", "videoalign"), "the rewards 'shapes' and 'videoalign' both give 'VQ'"),
        (("--reward", "clip", "--resume"), "--resume completes an output file; name it with --out"),
        (("--reward", "clip", "--out", "s.txt"), "it takes a file that ends in .jsonl or .csv"),
        (("--reward", "clip", "--force", "--resume"), "choose one"),
        (("--reward", "clip", "--force"), "--force replaces an output file; name it with --out"),
        (("--reward", "clip", "--weights", ""), "--weights is empty"),
        (("--reward", "shapes", "--preset", ""), "--preset is empty"),
        (("--reward", "shapes", "--path", ""), "--path '' names no folder"),
        (("--reward", "shapes", "--path", "shapes="), "--path 'shapes=' names no folder"),
        (("--reward", "clip", "--path", "clip=elsewhere"), "clip.path is given twice; give it once"),
        (("--reward", "clip", "--option", "clip.frames=3", "--option", "clip.frames=4"), "clip.frames is given twice"),
        (("--reward", "clip", "--prompt", "a \udcff"), "a \\xff: not UTF-8 text"),
        (("--reward", "shapes", "--path", "~nosuchuser"), "the reward 'shapes' has no option 'path'"),
        (("--reward", "videoalign", "--option", "videoalign.base=~nosuchuser"), "base = '~nosuchuser' is no folder"),
        (("--reward", "clip", "--prompts", "map.txt"), "map.txt: not a .csv or .jsonl file"),
        (("--preset", "settingb"), "did you mean 'setting-b'"),
    ],
)
def test_what_is_asked_for_wrongly_is_one_sentence(sage, clips, clip, align, arguments, sentence):
    models = [
        part
        for name, path in (("clip", clip), ("videoalign", align))
        if name in arguments
        for part in ("--path", f"{name}={path}")
    ]
    result = sage("score", str(clips), *arguments, *models)
    assert (result.code, len(result.err.strip().splitlines())) == (2, 1)
    assert sentence in result.err
    assert "Traceback" not in result.err


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def edit(model: Path, key: str, value: Any) -> None:
    """Set a key of model_config.json, or leave it out."""
    settings = json.loads((model / "model_config.json").read_text())
    settings[key] = value
    kept = {name: entry for name, entry in settings.items() if entry is not None}
    (model / "model_config.json").write_text(json.dumps(kept))


def number(model: Path, table: str, key: str, value: Any) -> None:
    """Set a key of one of model_config.json's tables."""
    settings = json.loads((model / "model_config.json").read_text())
    edit(model, table, settings[table] | {key: value})


def base_file(model: Path, name: str, text: str) -> None:
    """Give the checkpoint a base of its own, one file of which is spoilt."""
    settings = json.loads((model / "model_config.json").read_text())
    base = shutil.copytree(settings["model_config"]["model_name_or_path"], model / "base")
    (base / name).write_text(text)
    edit(model, "model_config", settings["model_config"] | {"model_name_or_path": "base"})


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda model: (model / "prompt_template.txt").unlink(), "prompt template is missing"),
        (lambda model: shutil.rmtree(model / "checkpoint-7"), "no checkpoint-N folder"),
        (
            lambda model: torch.save({"a": torch.zeros(1)}, model / "checkpoint-7" / "model.pth"),
            "does not fit this Qwen2-VL",
        ),
        (lambda model: (model / "checkpoint-7" / "model.pth").write_text("hi"), "is not a whole file of weights"),
        (
            lambda model: os.truncate(model / "checkpoint-7" / "model.pth", 5000),
            "is not a whole file of weights",
        ),
        (lambda model: (model / "checkpoint-7" / "model.pth").write_text(POINTER), "is a Git LFS pointer"),
        (lambda model: (model / "model_config.json").write_text(POINTER), "is a Git LFS pointer"),
        (lambda model: (model / "model_config.json").write_text("[1]"), "is list, not an object"),
        (lambda model: edit(model, "peft_lora_config", None), "peft_lora_config.lora_alpha is missing"),
        (lambda model: edit(model, "inference_config", {"VQ_mean": 0.0}), "inference_config.VQ_std is missing"),
        (lambda model: number(model, "data_config", "fps", 0), "data_config.fps = 0; it takes a positive number"),
        (lambda model: number(model, "data_config", "fps", math.nan), "data_config.fps = nan; it takes a positive"),
        (lambda model: number(model, "data_config", "max_frame_pixels", True), "max_frame_pixels = True; it takes a"),
        (lambda model: number(model, "inference_config", "TA_std", 0.0), "TA_std = 0.0; it takes a positive number"),
        (lambda model: number(model, "inference_config", "MQ_mean", "1"), "MQ_mean = '1'; it takes a number"),
        (lambda model: edit(model, "data_config", 3), "data_config of the VideoAlign weights is int, not an object"),
        (lambda model: base_file(model, "config.json", "{"), "config.json' is not a valid JSON file"),
        (lambda model: base_file(model, "tokenizer.json", "{"), "its tokenizer cannot be read"),
    ],
)
def test_a_broken_model_is_one_sentence_and_writes_nothing(sage, clips, align, tmp_path, spoil, sentence):
    model = Path(shutil.copytree(align, tmp_path / "model"))
    spoil(model)
    out = tmp_path / "s.jsonl"
    result = sage("score", str(clips), "--reward", "videoalign", "--path", str(model), "--out", str(out))
    assert result.code == 2
    assert sentence in result.err
    assert "Traceback" not in result.err
    assert not out.exists()


def test_no_videos_is_one_sentence(sage, tmp_path, clip):
    (tmp_path / "empty").mkdir()
    for source, sentence in ((str(tmp_path / "empty"), "no video in it"), (str(tmp_path / "no.mp4"), "no such file")):
        result = sage("score", source, "--reward", "clip", "--path", clip)
        assert (result.code, sentence in result.err) == (2, True)
    result = sage("score", "--reward", "clip", "--path", clip)
    assert (result.code, "name the videos" in result.err) == (2, True)


def test_a_map_is_checked_against_the_videos(sage, clips, clip, tmp_path):
    for beside in clips.glob("*.txt"):
        beside.unlink()
    prompts = tmp_path / "map.csv"
    options = ("--reward", "clip", "--path", clip, "--prompts", str(prompts), "--prompt", "a kite")
    prompts.write_text("video,prompt\na.mp4,x\nz.mp4,y\n")
    result = sage("score", str(clips), *options)
    assert (result.code, "map.csv: 1 of 2 rows name no video here, first z.mp4" in result.out) == (0, True)
    prompts.write_text("video,prompt\nz.mp4,y\n")
    result = sage("score", str(clips), *options)
    assert (result.code, "none of its 1 rows names a video given here; first z.mp4" in result.err) == (2, True)
    prompts.write_text("video,prompt\na.mp4,x\na.mp4,y\n")
    result = sage("score", str(clips), *options)
    assert (result.code, "a.mp4 has two prompts: 'x' and 'y'" in result.err) == (2, True)
    prompts.with_suffix(".jsonl").write_text('{"video": "a\\u0000.mp4", "prompt": "x"}\n')
    result = sage("score", str(clips), *options[:4], "--prompts", str(prompts.with_suffix(".jsonl")))
    assert (result.code, "it takes a text without the character 0" in result.err) == (2, True)
    manifest = clips / "manifest.jsonl"
    prompts.write_text("video,prompt\na.mp4,x\n")
    manifest.write_text("".join(json.dumps({"file": "a.mp4", "prompt": prompt}) + "\n" for prompt in "xy"))
    result = sage("score", str(clips), *options)
    assert (result.code, "manifest.jsonl: a.mp4 has two prompts: 'x' and 'y'" in result.err) == (2, True)
    manifest.unlink()
    prompts.write_text("video;prompt\na.mp4;x\n")
    result = sage("score", str(clips), *options)
    assert (result.code, "put commas between the columns, not semicolons" in result.err) == (2, True)
    result = sage("score", str(clips), "--reward", "clip", "--path", clip, "--prompt", "  ")
    assert (result.code, "--prompt is empty" in result.err) == (2, True)


def test_a_name_that_is_no_text_fails_alone(sage, clips, clip, tmp_path):
    shutil.copy(clips / "a.mp4", os.fsdecode(os.fsencode(clips) + b"/n\xff.mp4"))
    out = tmp_path / "s.jsonl"
    result = sage("score", str(clips), "--reward", "clip", "--path", clip, "--prompt", "x", "--out", str(out))
    assert (result.code, "n\\xff.mp4: its name is not UTF-8; rename it" in result.out) == (1, True)
    assert len(rows(out)) == 3


def test_large_videos_are_scored_in_smaller_batches(sage, clips, clip, tmp_path, monkeypatch):
    from sagecli import score

    out, alone = tmp_path / "s.jsonl", tmp_path / "alone.jsonl"
    options = ("--reward", "clip", "--path", clip)
    assert sage("score", str(clips), *options, "--batch", "1", "--out", str(alone)).code == 0
    monkeypatch.setattr(score, "MAX_BYTES", 12 * 48 * 64 * 9)
    assert sage("score", str(clips), *options, "--batch", "8", "--out", str(out)).code == 0
    assert out.read_text() == alone.read_text()  # bitwise, as only the same batches give


def test_agreement_with_people_over_pairs(sage, clips, clip, tmp_path):
    out = tmp_path / "s.jsonl"
    pairs = tmp_path / "pairs.csv"
    header = "video_a,video_b,prompt,CLIPScore,Overall\n"
    names = [("a.mp4", "b.mp4"), ("b.mp4", "c.mkv"), ("a.mp4", "c.mkv")]
    pairs.write_text(header + "".join(f"clips/{a},clips/{b},a square,A,same\n" for a, b in names))
    options = ("--reward", "clip", "--path", clip, "--option", "clip.scale=cosine", "--out", str(out))
    result = sage("score", "--pairs", str(pairs), *options)
    assert result.code == 0, result.err
    scores = {Path(row["video"]).name: row["scores"]["CLIPScore"] for row in rows(out)}
    right = sum(scores[a] > scores[b] for a, b in names) / 3
    line = next(line for line in result.out.splitlines() if "│ CLIPScore" in line and line.count("│") == 6)
    assert f"{right:.4f}" in line
    line = next(line for line in result.out.splitlines() if "│ Overall" in line and line.count("│") == 6)
    assert "1.0000" in line  # with a wide enough tie every pair is the same
    pairs.write_text(header.replace("CLIPScore", "VQ").replace(",Overall", "") + "clips/a.mp4,clips/b.mp4,x,A\n")
    result = sage("score", "--pairs", str(pairs), *options, "--force")
    assert (result.code, "no column of preferences; these rewards have CLIPScore, Overall" in result.err) == (2, True)
    pairs.write_text(header + "clips/a.mp4,clips/b.mp4,x,C,A\n")
    result = sage("score", "--pairs", str(pairs), *options, "--force")
    assert (result.code, "CLIPScore is 'C'; it takes A, B or same" in result.err) == (2, True)
    pairs.write_text(header.replace("Overall", "overall") + "clips/a.mp4,clips/b.mp4,x,A,A\n")
    result = sage("score", "--pairs", str(pairs), *options, "--force")
    assert (result.code, "it has the column 'overall'; write it 'Overall'" in result.err) == (2, True)
    pairs.write_text(header + "clips/a.mp4,clips/none.mp4,x,A,A\n")
    result = sage("score", "--pairs", str(pairs), *options, "--force")
    assert (result.code, "none.mp4 is no file" in result.err) == (2, True)


def test_a_reward_of_another_package_is_used_by_name(clips, tmp_path):
    """Installed for real, into a prefix of its own."""
    source = Path(__file__).parent / "example_reward"
    assert len((source / "sage_brightness.py").read_text().splitlines()) <= 15
    shutil.copytree(source, tmp_path / "package")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    prefix = tmp_path / "prefix"
    subprocess.run([sys.executable, *install, "--target", str(prefix), str(tmp_path / "package")], check=True)
    out = tmp_path / "s.jsonl"
    command = [sys.executable, "-m", "sagecli.cli", "score", str(clips), "--reward", "brightness", "--out", str(out)]
    for beside in clips.glob("*.txt"):  # it needs no prompt
        beside.unlink()
    environment = os.environ | {"PYTHONPATH": str(prefix)}
    subprocess.run([*command, "--option", "brightness.power=2.0"], check=True, env=environment, cwd=tmp_path)
    for row in rows(out):
        frames = read_frames(Path(row["video"]), range(row["num_frames"])).double() / 255
        assert row["scores"]["brightness"] == pytest.approx(float(frames.mean()) ** 2, rel=1e-5)
    result = subprocess.run(
        [*command[:-2], "--reward", "bright"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "no reward is called 'bright'; installed: brightness, clip, pickscore, shapes, videoalign" in result.stderr
