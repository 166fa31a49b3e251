"""Video files and contact sheets. Videos are [F, 3, H, W] in [0, 1]."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import imageio.v3 as iio
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# Near-lossless: these files are looked at closely and scored again. x264's macroblock tree reads uninitialised memory
# in videos as small as the embedded model's, which makes equal videos unequal files.
ENCODING = {"crf": "12", "x264-params": "no-mbtree=1"}
INK, FAINT, PAPER = (226, 228, 233), (140, 146, 158), (24, 26, 32)
GAP = 8


def to_uint8(video: Tensor) -> np.ndarray[Any, Any]:
    """Frames [F, H, W, 3] uint8."""
    return (video.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def write_video(path: Path, video: Tensor, fps: float) -> None:
    """An H.264 mp4 of exactly the video's size; odd sizes, which 4:2:0 cannot hold, are stored as 4:4:4."""
    frames = to_uint8(video)
    height, width = frames.shape[1:3]
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    with av.open(str(partial), "w") as file:
        stream = file.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options=ENCODING)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv444p" if height % 2 or width % 2 else "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))
    partial.replace(path)


@dataclass(frozen=True)
class SheetRow:
    """One video of a contact sheet."""

    label: str
    note: str
    """Small print under the label."""
    frames: list[Image.Image]


def sheet_row(video: Tensor, row: dict[str, Any], max_frames: int = 9, width: int = 96) -> SheetRow:
    """A row of a video and what is known of it (prompt, reward, axes): frames spread evenly, each `width` wide."""
    shown = np.linspace(0, len(video) - 1, min(len(video), max_frames)).round().astype(int)
    frames = [Image.fromarray(frame) for frame in to_uint8(video[shown])]
    size = (width, round(width * frames[0].height / frames[0].width))
    small = [frame.resize(size, Image.Resampling.BICUBIC) for frame in frames]
    return SheetRow(row["prompt"], _score_note(row), small)


def _score_note(row: dict[str, Any]) -> str:
    """ "reward 0.61 · VQ 0.70 · ..." with what could be scored."""
    scores = {"reward": row.get("reward")} | row.get("axes", {})
    parts = [f"{name} {value:.3f}" for name, value in scores.items() if value is not None]
    return " · ".join([*parts, f"seed {row['seed']}"])


def write_sheet(path: Path, title: str, rows: Sequence[SheetRow]) -> None:
    """A PNG with one row a video, time from left to right."""
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    iio.imwrite(partial, np.asarray(draw_sheet(title, rows)))
    partial.replace(path)


def draw_sheet(title: str, rows: Sequence[SheetRow]) -> Image.Image:
    """The picture of write_sheet."""
    width, height = rows[0].frames[0].size
    head, text, pitch = 34, 36, height + 36 + GAP
    longest = max(len(row.frames) for row in rows)
    sheet = Image.new("RGB", (max(longest * (width + 3), 300) + 2 * GAP, head + len(rows) * pitch + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, GAP), title, INK, ImageFont.load_default(17))
    for index, row in enumerate(rows):
        top = head + index * pitch
        draw.text((GAP, top), _fitted(row.label, sheet.width - 2 * GAP, 14), INK, ImageFont.load_default(14))
        draw.text((GAP, top + 17), _fitted(row.note, sheet.width - 2 * GAP, 12), FAINT, ImageFont.load_default(12))
        for place, frame in enumerate(row.frames):
            sheet.paste(frame, (GAP + place * (width + 3), top + text))
    return sheet


def _fitted(text: str, width: int, size: int) -> str:
    """The text, cut with an ellipsis where it would run past `width` pixels."""
    font = ImageFont.load_default(size)
    while text and font.getlength(text) > width:
        text = text[:-2].rstrip(" …") + "…"
    return text


def side_by_side(path: Path, left: Path, right: Path) -> None:
    """One PNG of two, aligned at the top."""
    pictures = [Image.open(left), Image.open(right)]
    sheet = Image.new("RGB", (sum(p.width for p in pictures), max(p.height for p in pictures)), PAPER)
    sheet.paste(pictures[0], (0, 0))
    sheet.paste(pictures[1], (pictures[0].width, 0))
    sheet.save(path)
