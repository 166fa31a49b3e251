"""Video files: which ones a path names, how many frames they have, and the frames themselves.

Frames are counted, not timed, as the reward models were trained: frame k is the k-th that the file decodes to.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.video.frame import VideoFrame
from torch import Tensor

from sagecli.errors import UserError

SUFFIXES = (".mp4", ".m4v", ".mkv", ".webm", ".mov", ".avi", ".gif")
MANIFEST = "manifest.jsonl"


class UnreadableVideoError(Exception):
    """A file that cannot be decoded; its text is the reason."""


@dataclass(frozen=True)
class VideoInfo:
    """What a file decodes to."""

    num_frames: int
    fps: float
    height: int
    """In pixels, as shown: after the file's rotation."""
    width: int


def find_videos(sources: Sequence[str]) -> list[Path]:
    """Video files of files, folders (and folders in them), patterns and rollout manifests; each once, in order.

    UserError for a source that names none.
    """
    found: dict[Path, None] = {}
    for source in sources:
        path = Path(source).expanduser()
        paths = [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not paths:
            raise UserError(f"{source}: no such file or folder, and no file matches it")
        videos = [video for one in paths for video in _videos_of(one)]
        if not videos:
            raise UserError(f"{source}: no video in it; videos end in {', '.join(SUFFIXES)}")
        found |= dict.fromkeys(videos)
    return list(found)


def _videos_of(path: Path) -> list[Path]:
    """The videos that one path stands for; a file is taken for a video whatever its name."""
    from sagecli.videoprompts import table

    if path.is_dir():
        inside = (file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES and file.is_file())
        return [file for file in inside if not file.name.startswith(".")]
    if path.name == MANIFEST:
        return [path.parent / row["file"] for row in table(path, ("file",))]
    return [path]


def probe(path: Path) -> VideoInfo:
    """Decode a file once, keeping nothing; UnreadableVideoError where a part of it cannot be."""
    frames = 0
    first: VideoFrame | None = None
    times: list[float] = []
    try:
        with av.open(str(path)) as file:
            stream = _video_stream(file)
            rate, announced = stream.average_rate or stream.guessed_rate, stream.frames
            packets = 0
            for packet in file.demux(stream):
                packets += packet.size > 0
                for frame in packet.decode():
                    first = first or frame
                    frames += 1
                    if frame.time is not None:
                        times.append(frame.time)
    except (av.FFmpegError, OSError) as error:
        raise UnreadableVideoError(_reason(path, error, frames)) from None
    if first is None:
        raise UnreadableVideoError("it has no frame")
    if packets < announced:
        raise UnreadableVideoError(f"it is cut short: {packets} of {announced} frames are there")
    height, width = _turned(np.empty((first.height, first.width)), first.rotation).shape
    return VideoInfo(frames, _fps(float(rate or 0), times), height, width)


def _video_stream(file: "av.container.InputContainer") -> "av.VideoStream":
    if not file.streams.video:
        raise UnreadableVideoError("it has no video stream" + (", only sound" if file.streams.audio else ""))
    stream = file.streams.video[0]
    stream.thread_type = "AUTO"
    return stream


def _fps(announced: float, times: list[float]) -> float:
    """Frames a second: as announced, unless the frames' own times say otherwise; 1 where neither says anything."""
    span = max(times) - min(times) if len(times) > 1 else 0.0
    measured = (len(times) - 1) / span if span > 0 else 0.0
    if announced > 0 and (not measured or abs(measured / announced - 1) < 0.01):
        return announced
    return measured or 1.0


def _reason(path: Path, error: Exception, frames: int) -> str:
    """Why libav stopped, in words that need no knowledge of it."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if path.is_file() and path.stat().st_size == 0:
        return "the file is empty"
    reason = getattr(error, "strerror", None) or error
    return (
        f"it breaks off after {frames} frames ({reason})" if frames else f"it is no video, or is cut short ({reason})"
    )


def read_frames(path: Path, numbers: Sequence[int]) -> Tensor:
    """Those frames [n, 3, H, W] uint8; `numbers` may repeat and come in any order.

    UnreadableVideoError where the file has not all of them.
    """
    wanted = set(numbers)
    kept: dict[int, Any] = {}
    size: tuple[int, int] | None = None
    try:
        with av.open(str(path)) as file:
            for number, frame in enumerate(islice(_decoded(file), max(wanted) + 1)):
                size = size or (frame.width, frame.height)  # a stream may change its size on the way
                if number in wanted:
                    pixels = frame.to_ndarray(format="rgb24", width=size[0], height=size[1])
                    kept[number] = np.ascontiguousarray(_turned(pixels, frame.rotation).transpose(2, 0, 1))
    except (av.FFmpegError, OSError) as error:
        raise UnreadableVideoError(_reason(path, error, len(kept))) from None
    if missing := wanted - set(kept):
        raise UnreadableVideoError(f"it has no frame {min(missing)} any more: it changed while it was read")
    return torch.from_numpy(np.stack([kept[number] for number in numbers]))


def _decoded(file: "av.container.InputContainer") -> Iterator[VideoFrame]:
    yield from file.decode(_video_stream(file))


def _turned(pixels: Any, degrees: int) -> Any:
    """Rows and columns turned counter-clockwise by a multiple of 90 degrees, as the file says it is to be shown."""
    return np.rot90(pixels, round(degrees / 90) % 4)
