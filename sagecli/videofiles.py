"""Video files: which ones a path names, how many frames they have, and the frames themselves.

Frames are counted, not timed, as the reward models were trained: frame k is the k-th that the file decodes to.
"""

import glob
import os
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
from sagecli.wholefiles import lacking

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

    A link is a video of its own, which may have its own prompt. UserError for a source that names none.
    """
    found: dict[Path, Path] = {}
    for source in sources:
        for video in _videos_of_source(source):
            found.setdefault(place_of(video), video)
    return list(found.values())


def place_of(path: Path) -> Path:
    """Its folder, absolute and without links, and its name: the same however the video was named."""
    return Path(os.path.realpath(path.parent), path.name)


def shown(path: Path) -> str:
    """Its name as text that can be printed and saved, whatever its bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _videos_of_source(source: str) -> list[Path]:
    path = Path(os.path.expanduser(source))
    if path.exists():
        videos = _videos_of(path)
    else:
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not matches:
            raise UserError(f"{source}: no such file or folder, and no file matches it")
        wanted = [match for match in matches if match.is_dir() or match.name == path.name or _looks_like_one(match)]
        videos = [video for match in wanted for video in _videos_of(match)]
    if not videos:
        raise UserError(f"{source}: no video in it; videos end in {', '.join(SUFFIXES)}")
    return videos


def _videos_of(path: Path) -> list[Path]:
    """The videos that one path stands for; a file is taken for a video whatever its name."""
    from sagecli.videoprompts import table

    if path.is_dir():
        return sorted(file for file in _files_in(path) if _looks_like_one(file))
    if path.name == MANIFEST:
        return [path.parent / row["file"] for row in table(path, ("file",))]
    return [path]


def _looks_like_one(file: Path) -> bool:
    there = file.is_file() or (file.is_symlink() and not file.exists())  # a broken link is reported, not passed over
    return file.suffix.lower() in SUFFIXES and there and not file.name.startswith(".")


def _files_in(folder: Path) -> Iterator[Path]:
    """Its files and those of the folders in it, through links too, each folder once."""
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(place, name) for name in names)


def probe(path: Path) -> VideoInfo:
    """Decode a file once, keeping nothing; UnreadableVideoError where a part of it cannot be."""
    frames = 0
    first: VideoFrame | None = None
    times: list[float] = []
    try:
        with _opened(path) as file:
            stream = _video_stream(file)
            rate = stream.average_rate or stream.guessed_rate
            packets = []
            for packet in file.demux(stream):
                packets += [packet.pts] if packet.size else []
                for frame in packet.decode():
                    first = first or frame
                    frames += 1
                    if frame.time is not None:
                        times.append(frame.time)
            announced, container = stream.frames, file.format.name
            reason = lacking(path, container, announced, packets)
        if reason and announced and "mp4" in container and _is_trimmed(path, announced):
            reason = ""
    except (av.FFmpegError, OSError) as error:
        raise UnreadableVideoError(_reason(path, error, frames)) from None
    if reason:
        raise UnreadableVideoError(f"it is cut short: {reason}")
    if first is None:
        raise UnreadableVideoError("it has no frame")
    height, width = _turned(np.empty((first.height, first.width)), first.rotation).shape
    return VideoInfo(frames, _fps(float(rate or 0), times), height, width)


def _is_trimmed(path: Path, announced: int) -> bool:
    """Whether an mp4 has all its frames, of which an edit list shows fewer."""
    with _opened(path, {"ignore_editlist": "1"}) as file:
        return sum(packet.size > 0 for packet in file.demux(_video_stream(file))) >= announced


def _opened(path: Path, options: dict[str, str] | None = None) -> "av.container.InputContainer":
    """The whole path, because libav takes what stands before a colon for a protocol; titles in any encoding."""
    return av.open(str(path.absolute()), options=options, metadata_errors="replace")


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
        with _opened(path) as file:
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
