"""Video files of every kind, for several test files."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

Pixels = np.ndarray[Any, Any]


def moving(count: int, height: int = 48, width: int = 64, seed: int = 0) -> Pixels:
    """[F, H, W, 3] uint8: a bright square that moves right over a smooth ground; every frame differs."""
    ground = np.linspace(30, 120, width)[None, :, None] + 10 * seed * np.ones((height, 1, 3))
    frames = np.repeat(ground[None], count, 0)
    for index in range(count):
        left = 2 + index * (width - 16) // max(count - 1, 1)
        frames[index, 8:20, left : left + 12] = (240, 200, 60)
    return frames.clip(0, 255).astype(np.uint8)


def save(
    path: Path,
    frames: Pixels,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    fps: int = 8,
    times: Sequence[int] | None = None,
    sound: str = "",
    title: str = "",
    **options: str,
) -> Path:
    """Write a video, its sound 1 s of the codec `sound`.

    times: a presentation time for each frame, in 1/1000 s, for a variable frame rate. options: the container's.
    """
    with av.open(f"file:{path}", "w", options=options) as file:
        if title:
            file.metadata["title"] = title
        stream: Any = file.add_stream(codec, rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pix_fmt
        if codec == "libx265":  # with B frames it leaves the decoding time of a lone frame to chance
            stream.options = {"x265-params": "bframes=0:log-level=none"}
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        voice: Any = file.add_stream(sound, rate=16000) if sound else None
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[index], Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
        if voice is not None:
            tone = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
            tone.sample_rate = 16000
            file.mux(voice.encode(tone))
            file.mux(voice.encode(None))
    return path


def save_sound(path: Path) -> Path:
    """An mp4 without a picture."""
    with av.open(str(path), "w") as file:
        voice: Any = file.add_stream("aac", rate=16000)
        tone = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        tone.sample_rate = 16000
        file.mux(voice.encode(tone))
        file.mux(voice.encode(None))
    return path


def turn(path: Path) -> Path:
    """Say in an mp4's track header that it is to be shown turned by a quarter, as phones do."""
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40  # version, times, identifiers, layer and volume come before it
    quarter = [0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000]  # 90 degrees clockwise
    data[matrix : matrix + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in quarter)
    path.write_bytes(data)
    return path


def trim(path: Path, start: int, count: int, fps: int = 8) -> Path:
    """Say in an mp4's edit list that only `count` frames from `start` on are shown, as editors that cut do."""
    data = bytearray(path.read_bytes())
    scale = data.index(b"mdhd") + 16  # units a second; version and two times come before it
    rate = int.from_bytes(data[scale : scale + 4], "big")
    edit = data.index(b"elst") + 12  # its one entry: the length in 1/1000 s, then where it starts
    for place, value in ((edit, count * 1000 // fps), (edit + 4, start * rate // fps)):
        data[place : place + 4] = value.to_bytes(4, "big")
    path.write_bytes(data)
    return path
