"""Whether a video file is all there: what its container announces against what the file has.

libav decodes a file that is cut short as a shorter video; for a reward that is another video.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

SEGMENT = 0x18538067
"""Matroska's element that holds everything but the first lines."""


def lacking(path: Path, container: str, announced: int, packets: Sequence[int | None]) -> str:
    """What of the file is missing, or "". announced: frames, 0 where unknown; packets: the time of each one there."""
    with path.open("rb") as file:
        if container == "gif":
            return "" if _ends(file) else "its end is missing"
        end = _segment_end(file) if container.startswith("matroska") else _boxes_end(file) if "mp4" in container else 0
    if (there := path.stat().st_size) < end:
        return f"{there} of {end} bytes are there"
    if len(packets) >= announced or (container == "avi" and _reaches(packets, announced)):
        return ""
    return f"{len(packets)} of {announced} frames are there"


def _reaches(packets: Sequence[int | None], announced: int) -> bool:
    """Whether an AVI's last frame is at its end: it announces places in time, some empty at a variable rate."""
    places = [place for place in packets if place is not None]
    gaps = [later - earlier for earlier, later in pairwise(places)]
    return bool(places) and places[-1] + max([1, *gaps]) >= announced


def _boxes_end(file: BinaryIO) -> int:
    """Where the last of an mp4's boxes ends by its own account."""
    end = 0
    while len(head := file.read(16)) >= 8 and head[4:8].isascii() and head[4:8].decode().isprintable():
        size = int.from_bytes(head[:4])
        size = int.from_bytes(head[8:16]) if size == 1 else size
        if size < 8:  # up to the end of the file, whatever that is, or no box
            break
        end += size
        file.seek(end)
    return end


def _segment_end(file: BinaryIO) -> int:
    """Where a Matroska or WebM file ends by its own account; 0 where it does not say, as in live recordings."""
    try:
        while True:
            name, _ = _number(file)
            _, size = _number(file)
            if name == SEGMENT:
                return 0 if size is None else file.tell() + size
            file.seek(size or 0, 1)
    except IndexError:
        return 0


def _number(file: BinaryIO) -> tuple[int, int | None]:
    """An EBML number: as it stands, and without the bit that marks its length; None where all bits are set."""
    first = file.read(1)[0]
    length = 9 - first.bit_length()
    number = int.from_bytes(bytes([first]) + file.read(length - 1))
    marker = 1 << 7 * length
    return number, None if number == 2 * marker - 1 else number - marker


def _ends(file: BinaryIO) -> bool:
    """Whether a GIF's blocks reach the one that says it ends."""
    try:
        file.seek(10)
        file.seek(13 + _palette_bytes(file.read(1)[0]))
        while (kind := file.read(1)[0]) != 0x3B:
            if kind == 0x2C:  # an image: place and size, flags, palette, code size
                file.seek(8, 1)
                file.seek(_palette_bytes(file.read(1)[0]) + 1, 1)
            elif kind == 0x21:  # an extension
                file.seek(1, 1)
            else:
                continue  # stray bytes, which decoders skip
            while size := file.read(1)[0]:
                file.seek(size, 1)
    except IndexError:
        return False
    return True


def _palette_bytes(flags: int) -> int:
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0
