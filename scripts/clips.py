"""Renders clips of moving shapes, clean or damaged: the embedded model's data and the tests' material."""

import torch
from torch import Tensor

from sagecli.rewards.shapes import BACKGROUND, COLOURS, DIRECTIONS, SIZES, SPEEDS, Caption, signed_distance


def path(caption: Caption, frames: int, start: tuple[float, float], speed_scale: float = 1.0) -> Tensor:
    """Centroids [F, 2] (x, y) of a clip whose middle frame lies at `start` (fractions of the frame)."""
    step = torch.tensor(DIRECTIONS[caption.direction]) * SPEEDS[caption.speed] * speed_scale
    times = torch.arange(frames) - (frames - 1) / 2
    return torch.tensor(start) + times[:, None] * step


def render(
    caption: Caption, centres: Tensor, size: int = 32, radius_scale: Tensor | float = 1.0, softness: float = 1.0
) -> Tensor:
    """A clip [F, 3, size, size] in [0, 1] of the captioned shape at `centres` [F, 2].

    radius_scale: one number, or [F] for a shape that pulses; softness: width of the outline in pixels.
    """
    grid = (torch.arange(size) + 0.5) / size
    x = grid[None, None, :] - centres[:, 0, None, None]
    y = grid[None, :, None] - centres[:, 1, None, None]
    radius = torch.as_tensor(radius_scale).reshape(-1, 1, 1) * SIZES[caption.size]
    distance = signed_distance(caption.shape, x, y, radius) * size
    inside = (0.5 - distance / softness).clamp(0, 1)[:, None]
    colour = torch.tensor(COLOURS[caption.colour])[:, None, None]
    background = torch.tensor(BACKGROUND)[:, None, None]
    return background + inside * (colour - background)
