import imageio.v3 as iio
import numpy as np
import pytest
import torch

from sagecli import media


def moving_bar(frames: int, height: int, width: int) -> torch.Tensor:
    video = torch.full((frames, 3, height, width), 0.1)
    for frame in range(frames):
        video[frame, frame % 3, :, frame * 2 : frame * 2 + 8] = 0.9
    return video


@pytest.mark.parametrize(("height", "width", "fps"), [(32, 32, 8.0), (34, 46, 24.0), (33, 45, 7.5), (32, 32, 29.97)])
def test_a_written_video_reads_back(tmp_path, height, width, fps):
    video = moving_bar(9, height, width)
    path = tmp_path / "video.mp4"
    media.write_video(path, video, fps)
    back = iio.imread(path, plugin="pyav")
    assert back.shape == (9, height, width, 3)
    assert iio.immeta(path, plugin="pyav")["fps"] == pytest.approx(fps, rel=1e-3)
    error = np.abs(back.astype(float) - media.to_uint8(video))
    assert error.mean() < 4  # 4:2:0 blurs the colours of the bar's edges
    assert [entry.name for entry in tmp_path.iterdir()] == ["video.mp4"]


def test_sheet_shows_the_frames_in_order(tmp_path):
    rows = []
    for seed in range(3):
        known = {"prompt": f"prompt {seed} " * 30, "reward": 0.5, "axes": {"VQ": 0.25, "MQ": None}, "seed": seed}
        rows.append(media.sheet_row(torch.linspace(0, 1, 17).view(17, 1, 1, 1).expand(17, 3, 8, 16), known))
    assert rows[0].note == "reward 0.500 · VQ 0.250 · seed 0"
    media.write_sheet(tmp_path / "sheet.png", "title", rows)
    sheet = iio.imread(tmp_path / "sheet.png")
    assert len(rows[0].frames) == 9
    levels = [np.asarray(frame).mean() for frame in rows[0].frames]
    assert levels == pytest.approx(np.linspace(0, 255, 9), abs=1)
    assert sheet.shape[1] >= 9 * 96
    media.side_by_side(tmp_path / "both.png", tmp_path / "sheet.png", tmp_path / "sheet.png")
    assert iio.imread(tmp_path / "both.png").shape[1] == 2 * sheet.shape[1]
