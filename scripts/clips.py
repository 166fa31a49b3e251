"""Renders clips of moving shapes, clean or damaged: the embedded model's data and the tests' material."""

import math

import torch
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, pad

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


def jitter(centres: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Centroids [F, 2] moved off their path by `amount` (standard deviation, frame heights)."""
    return centres + amount * torch.randn(centres.shape, generator=generator)


def pulse(frames: int, amount: float, generator: torch.Generator) -> Tensor:
    """Radius scales [F] around 1 that vary by `amount` (standard deviation)."""
    return (1 + amount * torch.randn(frames, generator=generator)).clamp(0.3, 2)


def flicker(clip: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """The clip with each frame's contrast to the background lowered by up to `amount` of itself."""
    background = torch.tensor(BACKGROUND)[:, None, None]
    return background + (1 - amount * torch.rand(len(clip), 1, 1, 1, generator=generator)) * (clip - background)


def blur(clip: Tensor, amount: float) -> Tensor:
    """The clip under a Gaussian of standard deviation `amount` (pixels)."""
    reach = math.ceil(3 * amount)
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / amount).square())
    kernel = kernel / kernel.sum()
    padded = pad(clip, (reach,) * 4, mode="replicate")
    rows = conv2d(padded.flatten(0, 1)[:, None], kernel[None, None, :, None])
    return conv2d(rows, kernel[None, None, None, :]).reshape(clip.shape)


def noise(clip: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """The clip with independent noise of standard deviation `amount` on every value."""
    return (clip + amount * torch.randn(clip.shape, generator=generator)).clamp(0, 1)


def blotches(clip: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """The clip with soft stains of standard deviation about `amount`, the same in all frames."""
    coarse = torch.randn(1, 3, 5, 5, generator=generator)
    stains = interpolate(coarse, size=clip.shape[-2:], mode="bicubic", align_corners=False)
    return (clip + amount * stains).clamp(0, 1)
