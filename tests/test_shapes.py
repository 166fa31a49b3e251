"""The shapes reward: perfect clips near 1, each damage on its own axis, and no gain from another speed or size."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import clips
import pytest
import torch
from torch import Generator, Tensor
from torch.nn.functional import avg_pool2d, interpolate

from sagecli.rewards.shapes import (
    BACKGROUND,
    COLOURS,
    DIRECTIONS,
    ERRORS,
    GRAMMAR,
    SHAPES,
    SIZES,
    SPEEDS,
    Caption,
    ShapesReward,
    parse,
)

FRAMES = 9
AXES = ("VQ", "MQ", "TA")
CAPTIONS = [Caption(*words) for words in itertools.product(SIZES, COLOURS, SHAPES, DIRECTIONS, SPEEDS)]
SOME = CAPTIONS[::11]  # 27 captions, with every word of each kind
# How far a shape reaches from its centroid in radii: to either side, up, down.
REACH = {"circle": (1.0, 1.0, 1.0), "square": (0.886, 0.886, 0.886), "triangle": (1.347, 1.555, 0.778)}
REWARD = ShapesReward()


def score(videos: Tensor, captions: list[Caption]) -> dict[str, Tensor]:
    """Axes and monitors of videos [B, F, 3, H, W], each [B]."""
    scores = REWARD(videos, [str(caption) for caption in captions], fps=8)
    return {**scores.axes, **scores.monitors}


def start(caption: Caption, generator: Generator) -> tuple[float, float]:
    """A middle position from which the whole shape stays within the frame."""
    side, above, below = (reach * SIZES[caption.size] for reach in REACH[caption.shape])
    dx, dy = (abs(part) * SPEEDS[caption.speed] * (FRAMES - 1) / 2 for part in DIRECTIONS[caption.direction])
    u, v = torch.rand(2, generator=generator).tolist()
    low_x, high_x, low_y, high_y = side + dx, 1 - side - dx, above + dy, 1 - below - dy
    return low_x + u * (high_x - low_x), low_y + v * (high_y - low_y)


def clean(caption: Caption, generator: Generator, size: int = 32) -> Tensor:
    return clips.render(caption, clips.path(caption, FRAMES, start(caption, generator)), size)


def other(caption: Caption, field: str) -> Caption:
    """The caption with the next word of its kind."""
    words = list({"size": SIZES, "colour": COLOURS, "shape": SHAPES, "speed": SPEEDS}[field])
    return replace(caption, **{field: words[(words.index(getattr(caption, field)) + 1) % len(words)]})


def centred(shown: Caption, centres: Tensor | None = None, radius: Tensor | float = 1.0) -> Tensor:
    path = clips.path(shown, FRAMES, (0.5, 0.5)) if centres is None else centres
    return clips.render(shown, path, 32, radius)


def straight(caption: Caption, degrees: float, speed: float = 1.0) -> Tensor:
    """A clip that moves at an angle to the commanded direction."""
    ahead = torch.tensor(DIRECTIONS[caption.direction]) * SPEEDS[caption.speed] * speed
    angle = torch.deg2rad(torch.tensor(degrees))
    step = ahead * angle.cos() + torch.stack([-ahead[1], ahead[0]]) * angle.sin()
    return centred(caption, 0.5 + (torch.arange(FRAMES) - (FRAMES - 1) / 2)[:, None] * step)


def autoencoded(clip: Tensor) -> Tensor:
    """What a weak autoencoder leaves of a clip: blur, colour that bleeds over blocks of 4 pixels, some ringing."""
    soft, softer = clips.blur(clip, 1.0), clips.blur(clip, 2.0)
    blocks = interpolate(avg_pool2d(clip, 4), scale_factor=4, mode="bilinear")
    return (0.75 * soft + 0.25 * blocks + 0.3 * (soft - softer)).clamp(0, 1)


@pytest.mark.parametrize("size", [32, 48])
def test_perfect_clips_score_near_one_wherever_they_start(size: int) -> None:
    generator = Generator().manual_seed(size)
    scores = score(torch.stack([clean(caption, generator, size) for caption in CAPTIONS]), CAPTIONS)
    for axis in AXES:
        assert scores[axis].min() > 0.9
        assert scores[axis].mean() > 0.97
    assert scores["speed_error"].max() < 0.05
    assert scores["size_error"].max() < 0.05


def test_resolutions_agree_on_damaged_clips() -> None:
    both = []
    for size in (32, 48):
        generator = Generator().manual_seed(0)
        centres = [clips.jitter(clips.path(c, FRAMES, (0.5, 0.5)), 0.01, generator) for c in SOME]
        wrong = [other(c, "shape") if index % 2 else c for index, c in enumerate(SOME)]
        pictures = [clips.render(c, path, size) for c, path in zip(wrong, centres, strict=True)]
        both.append(score(torch.stack([clips.noise(picture, 0.03, generator) for picture in pictures]), SOME))
    for axis in AXES:
        assert both[0][axis].mean() < 0.8
        assert (both[0][axis] - both[1][axis]).abs().mean() < 0.04


DAMAGES: dict[str, tuple[str, Callable[[Caption, Tensor, Generator], Tensor]]] = {
    "colour": ("TA", lambda c, path, g: centred(other(c, "colour"))),
    "shape": ("TA", lambda c, path, g: centred(other(c, "shape"))),
    "speed": ("TA", lambda c, path, g: centred(other(c, "speed"))),
    "size": ("TA", lambda c, path, g: centred(other(c, "size"))),
    "opposite": ("TA", lambda c, path, g: straight(c, 180)),
    "across": ("TA", lambda c, path, g: straight(c, 90)),
    "jitter": ("MQ", lambda c, path, g: centred(c, clips.jitter(path, 0.02, g))),
    "pulse": ("MQ", lambda c, path, g: centred(c, path, clips.pulse(FRAMES, 0.1, g))),
    "flicker": ("MQ", lambda c, path, g: clips.flicker(centred(c), 0.3, g)),
    "blur": ("VQ", lambda c, path, g: clips.blur(centred(c), 1.2)),
    "noise": ("VQ", lambda c, path, g: clips.noise(centred(c), 0.04, g)),
    "blotches": ("VQ", lambda c, path, g: clips.blotches(centred(c), 0.06, g)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_lowers_its_own_axis_most(damage: str) -> None:
    own, make = DAMAGES[damage]
    generator = Generator().manual_seed(1)
    paths = [clips.path(caption, FRAMES, (0.5, 0.5)) for caption in CAPTIONS]
    damaged = [make(caption, path, generator) for caption, path in zip(CAPTIONS, paths, strict=True)]
    before = score(torch.stack([centred(caption) for caption in CAPTIONS]), CAPTIONS)
    after = score(torch.stack(damaged), CAPTIONS)
    fall = {axis: before[axis] - after[axis] for axis in AXES}
    most_elsewhere = torch.stack([fall[axis] for axis in AXES if axis != own]).amax(0)
    assert fall[own].mean() > 0.25
    assert fall[own].mean() > 1.2 * most_elsewhere.mean()
    assert (fall[own] > most_elsewhere).float().mean() > 0.95


def test_every_error_answers_to_what_it_is_named_for() -> None:
    small = parse("a small red circle moving left fast")
    generator = Generator().manual_seed(0)
    path = clips.path(small, FRAMES, (0.5, 0.5))
    dirty = centred(small)
    dirty[:, :, :6] += 0.1
    stained = centred(small)
    stained[:, 1, 15:17, 15:17] += 0.5  # where the middle frame's shape is
    shown = {
        "dirt": dirty,
        "softness": clips.blur(centred(small), 1.2),
        "unevenness": stained,
        "wander": centred(small, clips.jitter(path, 0.03, generator)),
        "pulse": centred(small, path, clips.pulse(FRAMES, 0.2, generator)),
        "flicker": clips.flicker(centred(small), 0.5, generator),
        "colour": centred(other(small, "colour")),
        "shape": centred(other(small, "shape")),
        "direction": straight(small, 90),
        "speed": centred(other(small, "speed")),
        "size": centred(other(small, "size")),
    }
    scores = REWARD(torch.stack(list(shown.values())), [str(small)] * len(shown), fps=8)
    units = {name: unit for axis in ERRORS.values() for name, unit in axis.items()}
    for name, details in zip(shown, scores.details, strict=True):
        errors = {other_name: details[other_name] / units[other_name] for other_name in units}
        assert errors[name] > 0.2
        assert max(errors, key=errors.__getitem__) == name


def graded(videos: list[Tensor], caption: Caption, axis: str) -> list[float]:
    values: list[float] = score(torch.stack(videos), [caption] * len(videos))[axis].tolist()
    return values


def falls(values: list[float], least: float = 0.005) -> bool:
    return all(before - after > least for before, after in itertools.pairwise(values))


@pytest.mark.parametrize("caption", CAPTIONS[::41], ids=str)
def test_scores_are_graded_even_far_off(caption: Caption) -> None:
    path = clips.path(caption, FRAMES, (0.5, 0.5))
    assert falls(graded([straight(caption, degrees) for degrees in (0, 20, 45, 90, 135, 180)], caption, "TA"))
    ratios = (1, 1.15, 1.4, 2, 2.8)
    for scales in (ratios, [1 / ratio for ratio in ratios]):
        moved = [straight(caption, 0, scale) for scale in scales]
        sized = [centred(caption, None, scale**0.5) for scale in scales]
        assert falls(graded(moved, caption, "TA"))
        assert falls(graded(sized, caption, "TA"))
    wrong = centred(other(caption, "colour"))
    mixed = [torch.lerp(centred(caption), wrong, share) for share in (0, 0.2, 0.5, 0.8, 1)]
    assert falls(graded(mixed, caption, "TA"))
    assert falls(
        graded([centred(caption), *(clips.blur(centred(caption), s) for s in (0.7, 1, 1.5, 2))], caption, "VQ")
    )
    jittered = [
        centred(caption, clips.jitter(path, amount, Generator().manual_seed(2)))
        for amount in (0.001, 0.004, 0.01, 0.02, 0.04)
    ]
    assert falls(graded(jittered, caption, "MQ"))
    noisy = [
        clips.noise(centred(caption), amount, Generator().manual_seed(2)) for amount in (0, 0.01, 0.03, 0.06, 0.12)
    ]
    assert falls(graded(noisy, caption, "VQ"))


SCALES = (0.4, 0.6, 0.8, 0.93, 1.07, 1.25, 1.6, 2.5)
HACKED = {
    "clean": lambda clip, g: clip,
    "jitter": lambda clip, g: clip,  # by the path
    "jitter of the motion": lambda clip, g: clip,  # by the path, as large as the motion
    "blur 1": lambda clip, g: clips.blur(clip, 1.0),
    "blur 1.6": lambda clip, g: clips.blur(clip, 1.6),
    "noise .03": lambda clip, g: clips.noise(clip, 0.03, g),
    "noise .1": lambda clip, g: clips.noise(clip, 0.1, g),
    "blotches": lambda clip, g: clips.blotches(clip, 0.05, g),
    "flicker": lambda clip, g: clips.flicker(clip, 0.3, g),
    "autoencoder": lambda clip, g: autoencoded(clip),
    "all": lambda clip, g: clips.noise(clips.blotches(autoencoded(clip), 0.03, g), 0.03, g),
}


def hacked(damage: str, speed: float, radius: float) -> dict[str, Tensor]:
    """Scores of SOME captions' clips at a scale of speed and radius under a damage that does not depend on them."""
    videos = []
    for index, caption in enumerate(SOME):
        generator = Generator().manual_seed(index)
        offset = clips.jitter(torch.zeros(FRAMES, 2), 0.012, generator)
        times = torch.arange(FRAMES) - (FRAMES - 1) / 2
        offset -= times[:, None] * (times @ offset / times.square().sum())  # no change of the speed itself
        path = clips.path(caption, FRAMES, (0.5, 0.5), speed)
        path += offset * {"jitter": 1, "all": 1, "jitter of the motion": speed}.get(damage, 0)
        videos.append(HACKED[damage](clips.render(caption, path, 32, radius), generator))
    return score(torch.stack(videos), SOME)


@pytest.mark.parametrize("damage", HACKED)
def test_another_speed_or_size_never_pays(damage: str) -> None:
    faithful = hacked(damage, 1, 1)
    for scale in SCALES:
        for what, scores in (("speed", hacked(damage, scale, 1)), ("size", hacked(damage, 1, scale))):
            for axis in AXES:
                gain = scores[axis] - faithful[axis]
                assert gain.mean() < -0.002, (what, scale, axis)
                assert gain.max() < 0.06, (what, scale, axis)
                assert (gain > 0).float().mean() < (0.3 if 0.9 < scale < 1.1 else 0.1), (what, scale, axis)


def test_monitors_measure_log_ratios() -> None:
    for scale in (0.5, 0.8, 1.25, 1.5):
        expected = abs(torch.tensor(scale).log())
        moved = score(torch.stack([straight(caption, 0, scale) for caption in SOME]), SOME)
        sized = score(torch.stack([centred(c, torch.full((FRAMES, 2), 0.5), scale**0.5) for c in SOME]), SOME)
        assert (moved["speed_error"] - expected).abs().max() < 0.06
        assert (sized["size_error"] - expected).abs().max() < 0.06


def empties() -> dict[str, Tensor]:
    background = torch.tensor(BACKGROUND)[:, None, None].expand(FRAMES, 3, 32, 32)
    noise = torch.rand(FRAMES, 3, 32, 32, generator=Generator().manual_seed(0))
    return {
        "background": background,
        "black": torch.zeros_like(noise),
        "white": torch.ones_like(noise),
        "noise": noise,
        "still": centred(CAPTIONS[0], torch.full((FRAMES, 2), 0.5)),
    }


@pytest.mark.parametrize("kind", empties())
def test_clips_without_a_moving_shape_score_low_and_have_finite_gradients(kind: str) -> None:
    for caption in (CAPTIONS[0], CAPTIONS[-1]):
        video = empties()[kind][None].clone().requires_grad_()
        scores = score(video, [caption])
        for name, value in scores.items():
            (gradient,) = torch.autograd.grad(value.sum(), video, retain_graph=True)
            assert value.isfinite().all()
            assert gradient.isfinite().all()
            assert name not in AXES or value.item() < 0.5
        assert scores["TA"].item() < 0.15


@pytest.mark.parametrize("kind", ["noise", "damaged", "clean"])
def test_gradients_equal_finite_differences(kind: str) -> None:
    caption = parse("a small yellow triangle moving up slowly")
    generator = Generator().manual_seed(3)
    clip = clean(caption, generator)
    if kind == "noise":
        clip = torch.rand(clip.shape, generator=generator)
    if kind == "damaged":
        clip = clips.noise(clips.blur(clip, 1.0), 0.03, generator)
    video = clip.double()[None].requires_grad_()
    scores = score(video, [caption])
    # Along each axis's own gradient, where the change is largest, and along a random direction.
    for name, value in scores.items():
        (gradient,) = torch.autograd.grad(value.sum(), video, retain_graph=True)
        noise = torch.randn(clip.shape, generator=generator, dtype=torch.float64)[None]
        for direction in (gradient / gradient.norm(), noise / noise.norm()):
            step = 1e-6 * direction
            with torch.no_grad():
                change = (score(video + step, [caption])[name] - score(video - step, [caption])[name]) / 2e-6
            torch.testing.assert_close(change, (gradient * direction).sum()[None], rtol=1e-3, atol=1e-6)


def test_climbing_the_gradient_repairs_a_clip() -> None:
    caption = parse("a large blue square moving right slowly")
    video = clips.blur(centred(replace(caption, shape="circle")), 1.5)[None]
    before = score(video, [caption])
    for _ in range(40):
        video = video.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(sum(score(video, [caption])[axis].sum() for axis in AXES), video)
        video = (video + 0.3 * gradient / gradient.norm()).clamp(0, 1)
    after = score(video.detach(), [caption])
    assert after["TA"] > before["TA"] + 0.05
    assert after["VQ"] > before["VQ"] + 0.05


def test_scores_do_not_depend_on_the_batch() -> None:
    generator = Generator().manual_seed(4)
    videos = torch.stack([clips.noise(clips.blur(clean(c, generator), 0.8), 0.03, generator) for c in SOME])
    together = score(videos, SOME)
    for index, caption in enumerate(SOME):
        alone = score(videos[index : index + 1], [caption])
        for name, value in alone.items():
            torch.testing.assert_close(value[0], together[name][index], rtol=0, atol=1e-6)


def test_bfloat16_videos_are_scored_in_float32() -> None:
    scores = score(centred(CAPTIONS[0])[None].bfloat16(), [CAPTIONS[0]])
    assert scores["TA"].dtype == torch.float32
    assert scores["TA"].item() > 0.9


def test_wide_frames_have_their_own_centre() -> None:
    caption = parse("a small green circle moving right fast")
    middle = torch.full((FRAMES, 3, 32, 16), 0.0) + torch.tensor(BACKGROUND)[:, None, None]
    wide = torch.cat([middle, centred(caption), middle], dim=3)
    for name, value in score(wide[None], [caption]).items():
        torch.testing.assert_close(value, score(centred(caption)[None], [caption])[name], rtol=0, atol=2e-3)


def test_captions_are_read_back() -> None:
    assert all(parse(str(caption)) == caption for caption in CAPTIONS)
    assert parse("A  Small RED circle moving left fast. ") == CAPTIONS[1]


def test_what_cannot_be_scored_says_what_can() -> None:
    video = centred(CAPTIONS[0])[None]
    with pytest.raises(ValueError, match="a red fox") as error:
        REWARD(video, ["a red fox"], fps=8)
    assert GRAMMAR in str(error.value)
    with pytest.raises(ValueError, match=r"\(1, 9, 3, 32, 32\) and 2 prompts"):
        REWARD(video, [str(CAPTIONS[0])] * 2, fps=8)
    with pytest.raises(ValueError, match=r"\[B, F >= 3, 3, H, W\]"):
        REWARD(video[:, :2], [str(CAPTIONS[0])], fps=8)
