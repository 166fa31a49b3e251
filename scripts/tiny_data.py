"""The embedded model's training clips, and what can be read back from a clip's pixels.

A clip shows its caption except where one of the caption's words was drawn wrong; some clips carry damage.
Lengths are fractions of the frame's height, as in rewards/shapes.py.
"""

import itertools
import math
import random

import torch
import torch.nn.functional as F  # noqa: N812
from clips import path, render
from torch import Tensor

from sagecli.rewards.shapes import BACKGROUND, COLOURS, DIRECTIONS, SHAPES, SIZES, SPEEDS, Caption, signed_distance

FRAMES, SIZE, FPS = 9, 32, 8
WORDS = {"size": SIZES, "colour": COLOURS, "shape": SHAPES, "direction": DIRECTIONS, "speed": SPEEDS}
CAPTIONS = [Caption(*words) for words in itertools.product(*WORDS.values())]
WRONG = 0.13  # share of clips in which one given word of the caption is not what is shown
DAMAGED = 0.3
DAMAGES = ("jitter", "flicker", "blur", "blotches", "pulse")
# How far a shape reaches from its centroid in units of its radius: left and right, up, down.
REACH = {"circle": (1.0, 1.0, 1.0), "square": (0.886, 0.886, 0.886), "triangle": (1.347, 1.555, 0.778)}


def wrong_caption(caption: Caption, draw: random.Random) -> Caption:
    """The caption with each word replaced by another of its kind with probability WRONG."""
    shown = {}
    for name, words in WORDS.items():
        word = getattr(caption, name)
        shown[name] = draw.choice([other for other in words if other != word]) if draw.random() < WRONG else word
    return Caption(**shown)


def random_start(caption: Caption, draw: random.Random) -> tuple[float, float]:
    """A middle position from which the whole shape stays within the frame."""
    radius = SIZES[caption.size]
    side, above, below = (reach * radius for reach in REACH[caption.shape])
    travel = SPEEDS[caption.speed] * (FRAMES - 1) / 2
    x_travel, y_travel = (abs(part) * travel for part in DIRECTIONS[caption.direction])
    x = (side + x_travel, 1 - side - x_travel)
    y = (above + y_travel, 1 - below - y_travel)
    return draw.uniform(min(x), max(x)), draw.uniform(min(y), max(y))


def random_clip(shown: Caption, draw: random.Random, damaged: float = DAMAGED) -> Tensor:
    """A clip [F, 3, SIZE, SIZE] in [0, 1] of the shape, damaged in one way with the given probability."""
    noise = torch.Generator().manual_seed(draw.getrandbits(62))
    damage = draw.choice(DAMAGES) if draw.random() < damaged else "none"
    strength = draw.uniform(0.4, 1.0)
    centres = path(shown, FRAMES, random_start(shown, draw), draw.uniform(0.92, 1.08))
    radius = torch.full((FRAMES,), draw.uniform(0.96, 1.04))
    if damage == "jitter":
        centres = centres + 0.035 * strength * torch.randn(FRAMES, 2, generator=noise)
    if damage == "pulse":
        radius = radius * (1 + 0.2 * strength * torch.randn(FRAMES, generator=noise).clamp(-2, 2))
    clip = render(shown, centres, SIZE, radius, softness=1 + 5 * strength if damage == "blur" else 1.0)
    background = torch.tensor(BACKGROUND)[:, None, None]
    if damage == "flicker":
        gain = 1 - 0.7 * strength * torch.rand(FRAMES, 1, 1, 1, generator=noise)
        clip = background + gain * (clip - background)
    if damage == "blotches":
        coarse = torch.randn(1, 3, 4, 4, generator=noise)
        clip = clip + 0.12 * strength * F.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic")
    return clip.clamp(0, 1)


def dataset(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Clips [N, F, 3, SIZE, SIZE] uint8 and the index [N] in CAPTIONS of the caption each was given."""
    draw = random.Random(seed)
    clips = torch.empty(count, FRAMES, 3, SIZE, SIZE, dtype=torch.uint8)
    captions = torch.empty(count, dtype=torch.long)
    for row in range(count):
        captions[row] = draw.randrange(len(CAPTIONS))
        clips[row] = (random_clip(wrong_caption(CAPTIONS[captions[row]], draw), draw) * 255).round()
    return clips, captions


def clean_clips(count: int, seed: int) -> tuple[Tensor, list[Caption]]:
    """Undamaged clips [N, F, 3, SIZE, SIZE] in [0, 1] that show exactly their captions."""
    draw = random.Random(seed)
    captions = [draw.choice(CAPTIONS) for _ in range(count)]
    return torch.stack([random_clip(caption, draw, damaged=0.0) for caption in captions]), captions


def read_clip(clip: Tensor) -> Caption:
    """The caption whose words are nearest to what a clip [F, 3, H, W] in [0, 1] shows."""
    background = torch.tensor(BACKGROUND)[:, None, None]
    palette = torch.tensor(list(COLOURS.values()))
    strength = (clip - background).abs().sum(1)
    core = strength > 0.75 * strength.flatten(1).amax(1)[:, None, None]
    seen = clip.movedim(1, -1)[core].median(0).values
    nearest = int((palette - seen).square().sum(1).argmin())
    contrast = (palette[nearest] - torch.tensor(BACKGROUND))[:, None, None]
    inside = ((clip - background) * contrast).sum(1) / contrast.square().sum()
    inside = ((inside - 0.15) / 0.7).clamp(0, 1)  # leaves out faint noise far from the shape
    grid = (torch.arange(clip.shape[-1]) + 0.5) / clip.shape[-1]
    area = inside.sum((1, 2)).clamp(min=1e-6)
    centres = torch.stack([(inside.sum(1) * grid).sum(1) / area, (inside.sum(2) * grid).sum(1) / area], dim=1)
    radius = (area / clip.shape[-1] ** 2 / math.pi).sqrt()
    times = torch.arange(len(clip)) - (len(clip) - 1) / 2
    motion = (times[:, None] * centres).sum(0) / times.square().sum()
    direction = max(DIRECTIONS, key=lambda word: float(motion @ torch.tensor(DIRECTIONS[word])))
    return Caption(
        size=min(SIZES, key=lambda word: abs(math.log(float(radius.median()) / SIZES[word]))),
        colour=list(COLOURS)[nearest],
        shape=min(SHAPES, key=lambda word: _shape_error(word, inside, centres, radius)),
        direction=direction,
        speed=min(SPEEDS, key=lambda word: abs(math.log(float(motion.norm() + 1e-6) / SPEEDS[word]))),
    )


def _shape_error(shape: str, inside: Tensor, centres: Tensor, radius: Tensor) -> float:
    grid = (torch.arange(inside.shape[-1]) + 0.5) / inside.shape[-1]
    x = grid[None, None, :] - centres[:, 0, None, None]
    y = grid[None, :, None] - centres[:, 1, None, None]
    ideal = (0.5 - signed_distance(shape, x, y, radius[:, None, None]) * inside.shape[-1]).clamp(0, 1)
    return float((ideal - inside).square().mean())


def shares_right(clips: Tensor, captions: list[Caption]) -> dict[str, float]:
    """The share of clips that show what their caption says, for each kind of word."""
    read = [read_clip(clip) for clip in clips]
    return {
        name: sum(getattr(seen, name) == getattr(told, name) for seen, told in zip(read, captions, strict=True))
        / len(captions)
        for name in WORDS
    }
