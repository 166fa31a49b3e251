"""VQ, MQ and TA of moving-shape clips, from their pixels alone.

The embedded model's captions read "a small red circle moving left fast": size, colour, shape, direction, speed.
Lengths are fractions of the frame's height, y grows downwards, one frame is the unit of time; every shape of one
size has the same area, so a measured area needs no knowledge of the shape.
"""

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

BACKGROUND = (0.08, 0.09, 0.12)
COLOURS = {
    "red": (0.90, 0.16, 0.14),
    "green": (0.16, 0.74, 0.26),
    "blue": (0.18, 0.38, 0.96),
    "yellow": (0.96, 0.84, 0.14),
    "purple": (0.70, 0.24, 0.86),
    "white": (0.93, 0.93, 0.93),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
SPEEDS = {"slowly": 0.019, "fast": 0.047}  # frame heights a frame
SIZES = {"small": 0.125, "large": 0.2}  # radius of the circle of equal area, frame heights
GRAMMAR = (
    f"a {'|'.join(SIZES)} {'|'.join(COLOURS)} {'|'.join(SHAPES)} moving {'|'.join(DIRECTIONS)} {'|'.join(SPEEDS)}"
)
_CAPTION = re.compile(
    rf"an? ({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) "
    rf"moving ({'|'.join(DIRECTIONS)}) ({'|'.join(SPEEDS)})\.?"
)


@dataclass(frozen=True)
class Caption:
    """What a prompt of the grammar asks for; the fields are its words."""

    size: str
    colour: str
    shape: str
    direction: str
    speed: str

    def __str__(self) -> str:
        return f"a {self.size} {self.colour} {self.shape} moving {self.direction} {self.speed}"


def parse(prompt: str) -> Caption:
    """The caption a prompt states; ValueError with the grammar where it states none."""
    match = _CAPTION.fullmatch(" ".join(prompt.lower().split()))
    if match is None:
        raise ValueError(f"the shapes reward cannot read {prompt!r}; it reads prompts like: {GRAMMAR}")
    return Caption(*match.groups())


def signed_distance(shape: str, x: Tensor, y: Tensor, radius: Tensor | float) -> Tensor:
    """Distance to the outline, negative inside, of a shape centred on its centroid.

    x, y: coordinates relative to the centroid; radius: of the circle of equal area; all in one unit, broadcast.
    """
    if shape == "circle":
        return (x.square() + y.square() + 1e-12).sqrt() - radius
    if shape == "square":
        half = radius * (math.sqrt(math.pi) / 2)
        return torch.maximum(x.abs() - half, y.abs() - half)
    inner = radius * math.sqrt(math.pi / (3 * math.sqrt(3)))  # inradius of the equilateral triangle
    slanted = x.abs() * (math.sqrt(3) / 2) - y / 2
    return torch.maximum(slanted - inner, y - inner)
