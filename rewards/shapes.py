"""VQ, MQ and TA of moving-shape clips, from their pixels alone.

The embedded model's captions read "a small red circle moving left fast": size, colour, shape, direction, speed.
Lengths are fractions of the frame's height, y grows downwards, one frame is the unit of time; every shape of one
size has the same area, so a measured area needs no knowledge of the shape.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from sagecli.rewards import Reward, Scores

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
GRAMMAR = f"a {'|'.join(SIZES)} {'|'.join(COLOURS)} {'|'.join(SHAPES)} moving {'|'.join(DIRECTIONS)} {'|'.join(SPEEDS)}"
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


ERRORS = {  # axis -> error -> the amount of it that counts as 1
    "VQ": {"dirt": 0.08, "softness": 0.36, "unevenness": 0.15},  # RGB distance; log ratio; share of the contrast
    "MQ": {"wander": 0.6, "pulse": 0.3, "flicker": 0.07},  # frames' worth of motion; share of area; of contrast
    # RGB distance; 1 from circle to square or triangle; distance of unit vectors; log ratio; log ratio of areas
    "TA": {"colour": 0.6, "shape": 0.8, "direction": 0.5, "speed": 0.5, "size": 0.36},
}
UNFAITHFUL = 0.5  # how much errors of speed and size (log ratios) lower MQ and VQ
CORE, NEAR = 0.36, 1.9  # half widths of the windows within and around a shape, radii
ANGULAR_UNITS = (0.0545, 0.1029, 0.0545)  # so that triangle and square have what follows
ANGULAR = {"circle": (0, 0, 0, 0, 0, 0), "square": (0, 0, 0, 0, -1, 0), "triangle": (0, 0, 0, 1, 0, 0)}


@dataclass(frozen=True)
class _Wanted:
    """What B captions ask for; lengths in frame heights."""

    contrast: Tensor  # [B, 3] colour minus background
    angular: Tensor  # [B, 6] angular parts of the shape
    sharp: Tensor  # [B] softness of a sharp outline
    radius: Tensor  # [B] of the circle of equal area
    area: Tensor  # [B]
    direction: Tensor  # [B, 2] unit vector
    speed: Tensor  # [B]


@dataclass(frozen=True)
class _Seen:
    """What B clips show; lengths in frame heights."""

    contrast: Tensor  # [B, 3] colour minus background, mostly of the brightest frames
    brightness: Tensor  # [B, F] of the shape's core, 1 for the palette's
    unevenness: Tensor  # [B] root mean square deviation within the core, share of its contrast
    area: Tensor  # [B, F]
    angular: Tensor  # [B, 6] angular parts of the shape
    velocity: Tensor  # [B, 2] of the uniform motion nearest to the centroids
    wander: Tensor  # [B] root mean square distance of the centroids from that motion
    softness: Tensor  # [B] sum of p (1 - p) over the pixels p near the shape, heights times pixels
    dirt: Tensor  # [B] root mean square contrast away from the shape


class ShapesReward(Reward):
    """Scores clips of moving shapes: every axis is 1 / (1 + sum of errors), so no error ever loses its slope.

    TA: colour, shape, direction, speed, size. MQ: wander off a uniform motion, unsteady area and brightness. VQ: dirty
    background, soft outline, uneven colour. Wander and softness count relative to the speed and size commanded, or
    seen where less; errors of speed and size lower MQ and VQ too: slower, faster, smaller or bigger gains on no axis.
    Differentiable in the pixels. Source: METHOD.md section 9.
    """

    axes = tuple(ERRORS)
    monitors = ("speed_error", "size_error")

    def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
        """Scores of videos [B, F >= 3, 3, H, W] in [0, 1]; fps is not used, as speeds are per frame.

        Monitors: |log(measured / commanded)| of the speed and of the area, with a floor under what is measured.
        Details: the errors, as in ERRORS. ValueError for a prompt outside the grammar.
        """
        if videos.dim() != 5 or videos.shape[1] < 3 or videos.shape[2] != 3 or len(videos) != len(prompts):
            given = f"{tuple(videos.shape)} and {len(prompts)} prompts"
            raise ValueError(f"the shapes reward takes videos [B, F >= 3, 3, H, W] and B prompts, not {given}")
        videos = videos.to(torch.promote_types(videos.dtype, torch.float32))
        wanted = _wanted([parse(prompt) for prompt in prompts], videos)
        seen = _look(videos, wanted.radius)
        speed = ((seen.velocity.square().sum(1) + 1e-6).sqrt() / wanted.speed).log()
        area = ((seen.area.mean(1) / wanted.area + 0.01) / 1.01).log()
        errors = _errors(seen, wanted, speed, area)
        unfaithful = 1 + UNFAITHFUL * (_rounded(speed, 0.03) + _rounded(area, 0.03))
        axes = {}
        for axis, ones in ERRORS.items():
            total = 1 + torch.stack([errors[name] / one for name, one in ones.items()]).sum(0)
            axes[axis] = 1 / total if axis == "TA" else 1 / (total * unfaithful)
        details = [dict(zip(errors, row, strict=True)) for row in torch.stack(list(errors.values()), 1).tolist()]
        return Scores(axes, {"speed_error": speed.abs(), "size_error": area.abs()}, details)


def _wanted(captions: list[Caption], like: Tensor) -> _Wanted:
    """What captions ask for, in the precision and at the height of the videos `like`."""
    radius = like.new_tensor([SIZES[caption.size] for caption in captions])
    return _Wanted(
        contrast=like.new_tensor([COLOURS[caption.colour] for caption in captions]) - like.new_tensor(BACKGROUND),
        angular=like.new_tensor([ANGULAR[caption.shape] for caption in captions]),
        sharp=like.new_tensor([_sharp(caption.shape, caption.size, like.shape[-2]) for caption in captions]),
        radius=radius,
        area=math.pi * radius.square(),
        direction=like.new_tensor([DIRECTIONS[caption.direction] for caption in captions]),
        speed=like.new_tensor([SPEEDS[caption.speed] for caption in captions]),
    )


def _look(videos: Tensor, radius: Tensor) -> _Seen:
    """Measures videos [B, F, 3, H, W]; radius [B], as commanded, says how far to look around the shape."""
    height, width = videos.shape[-2:]
    contrast = videos - videos.new_tensor(BACKGROUND)[:, None, None]
    energy = contrast.square().sum(2)
    weight = energy**3  # the brightest pixels: faint ones are noise, or an outline
    colour = (contrast * weight[:, :, None]).sum((1, 3, 4)) / (weight.sum((1, 2, 3)) + 1e-6)[:, None]
    full = _nearest_colour(colour)
    strength = full.square().sum(-1)[:, None]
    presence = torch.einsum("bfchw,bc->bfhw", contrast, full / strength)
    y = (torch.arange(height).to(videos) + 0.5) / height - 0.5
    x = (torch.arange(width).to(videos) + 0.5) / height - width / height / 2
    unit = radius[:, None, None]
    rough, _ = _centroid(presence.square().square(), y, x, torch.ones_like(y), torch.ones_like(x))
    y, x = y - rough[..., 1:], x - rough[..., :1]
    core = _window(y / unit, CORE), _window(x / unit, CORE)
    core_area = core[0].sum(-1) * core[1].sum(-1) + 1e-6
    brightness = _weigh(presence, *core) / core_area
    mean = _weigh(contrast, core[0][:, :, None], core[1][:, :, None]) / core_area[..., None]
    variance = _weigh((contrast - mean[..., None, None]).square().sum(2), *core) / core_area
    share = (variance / (strength * (brightness.square() + 0.01))).mean(1)
    level = (presence / (brightness.square() + 0.0025).sqrt()[..., None, None]).clamp(0, 1)
    mask = level.square() * (3 - 2 * level)  # leaves the outline where it is and drops faint noise
    near = _window(y / unit, NEAR), _window(x / unit, NEAR)
    offset, pixels = _centroid(mask, y, x, *near)
    y, x = (y - offset[..., 1:]) / unit, (x - offset[..., :1]) / unit
    velocity, wander = _motion(rough + offset)
    outside = _weigh(energy, 1 - near[0], torch.ones_like(near[1])) + _weigh(energy, near[0], 1 - near[1])
    outside_area = energy[0].numel() - (near[0].sum(-1) * near[1].sum(-1)).sum(1)
    return _Seen(
        contrast=colour,
        brightness=brightness,
        unevenness=(share + 4e-4).sqrt() - 0.02,
        area=pixels / height**2,
        angular=_angular(mask, y, x, pixels).mean(1),
        velocity=velocity,
        wander=wander,
        softness=_weigh(_outline(level), *near).mean(1) / height,
        dirt=(outside.sum(1) / (outside_area + 1) + 1e-4).sqrt() - 0.01,
    )


def _nearest_colour(contrast: Tensor) -> Tensor:
    """The palette's contrast [B, 3] nearest in direction, whatever the brightness; a mixture in between."""
    palette = contrast.new_tensor(list(COLOURS.values())) - contrast.new_tensor(BACKGROUND)
    cosine = contrast @ (palette / palette.norm(dim=1, keepdim=True)).T
    return torch.matmul((40 * cosine / (contrast.square().sum(-1, keepdim=True) + 1e-4).sqrt()).softmax(-1), palette)


def _window(offset: Tensor, half: float) -> Tensor:
    """1 within `half` of 0, else 0, with soft ends."""
    return torch.sigmoid((half - offset.square() / half) / 0.12)


def _weigh(image: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Sums [...] of images [..., H, W], each pixel times its row's and its column's weight [..., H], [..., W]."""
    return (rows[..., None, :] @ image @ columns[..., :, None])[..., 0, 0]


def _centroid(mask: Tensor, y: Tensor, x: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (x, y) [..., 2] and sum [...] of masks within a window; the means are 0 where a mask is empty."""
    total = _weigh(mask, rows, columns)
    means = torch.stack([_weigh(mask, rows, columns * x), _weigh(mask, rows * y, columns)], -1)
    return means / (total + 1e-3)[..., None], total


def _motion(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The uniform motion [B, 2] nearest to positions [B, F, 2], and their distance [B] from it."""
    time = torch.arange(positions.shape[1]).to(positions) - (positions.shape[1] - 1) / 2
    velocity = torch.einsum("f,bfk->bk", time, positions) / time.square().sum()
    rest = positions - positions.mean(1, keepdim=True) - time[:, None] * velocity[:, None]
    return velocity, (rest.square().sum((1, 2)) / (len(time) - 2) + 1e-10).sqrt()


def _angular(mask: Tensor, y: Tensor, x: Tensor, pixels: Tensor) -> Tensor:
    """Two-, three- and fourfold parts [..., 6] of masks: means of z^2, z^3 and z^4 under a Gaussian.

    z = x + iy in radii from the centroid; these are harmonic, so blur hardly changes them.
    """
    powers = torch.arange(5, device=mask.device)
    rows, columns = (axis[..., None] ** powers * torch.exp(-axis.square())[..., None] for axis in (y, x))
    moments = rows.mT @ mask @ columns / (pixels + 1e-3)[..., None, None]  # [..., k, j]: of y^k x^j
    parts = [
        torch.stack([math.comb(fold, k) * 1j**k * moments[..., k, fold - k] for k in range(fold + 1)]).sum(0) / unit
        for fold, unit in zip((2, 3, 4), ANGULAR_UNITS, strict=True)
    ]
    return torch.view_as_real(torch.stack(parts, -1)).flatten(-2)


def _outline(level: Tensor) -> Tensor:
    """High on the outline of levels [..., H, W], over a wider band where it is softer."""
    # Smoothed, since sharp outlines would differ by where they lie between pixels; faint noise counts for less.
    smooth = avg_pool2d(1.04 * level**3 / (level.square() + 0.04), 3, 1, 1, count_include_pad=False)
    return smooth * (1 - smooth)


@lru_cache
def _sharp(shape: str, size: str, height: int) -> float:
    """The softness of a sharp outline, a mean over its positions between pixels."""
    phase = torch.arange(4).repeat_interleave(4), torch.arange(4).repeat(4)
    y, x = ((torch.arange(height) + 0.5 + part[:, None] / 4) / height - 0.5 for part in phase)
    distance = signed_distance(shape, x[:, None, :], y[:, :, None], SIZES[size])
    return float(_outline((0.5 - distance * height).clamp(0, 1)).sum((1, 2)).mean() / height)


def _errors(seen: _Seen, wanted: _Wanted, speed: Tensor, area: Tensor) -> dict[str, Tensor]:
    """Every error [B] of ERRORS; speed and area [B]: log(measured / commanded)."""
    # An outline's length grows with the area's power 0.5: neither a smaller nor a bigger shape gets its full due.
    length = 0.6 * area.clamp(max=0) + 0.25 * area.clamp(min=0)
    softness = ((seen.softness + 1e-4) / wanted.sharp).log() - length - 0.05
    return {
        "dirt": seen.dirt,
        "softness": (softness + (softness.square() + 1e-4).sqrt()) / 2,
        "unevenness": seen.unevenness,
        "wander": _rounded(seen.wander / (wanted.speed * (speed.clamp(max=0).exp() + 0.1)), 0.1),
        "pulse": _deviation(seen.area / (wanted.area * area.clamp(max=0).exp())[:, None], 0.03),
        "flicker": _deviation(seen.brightness, 0.01),
        "colour": _rounded(seen.contrast - wanted.contrast, 0.05),
        "shape": _rounded(seen.angular - wanted.angular, 0.1),
        "direction": _rounded(seen.velocity / (speed.exp() * wanted.speed)[:, None] - wanted.direction, 0.1),
        "speed": _rounded(speed, 0.03),
        "size": _rounded(area, 0.03),
    }


def _rounded(error: Tensor, width: float) -> Tensor:
    """Lengths [B] of errors [B] or [B, N], the corner at 0 rounded within `width`: finite gradients."""
    return (error.reshape(len(error), -1).square().sum(1) + width**2).sqrt() - width


def _deviation(values: Tensor, width: float) -> Tensor:
    """Standard deviation [B] over the frames of values [B, F], rounded likewise."""
    return (values.var(1, unbiased=False) + width**2).sqrt() - width
