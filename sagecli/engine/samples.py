"""Samples of a round after sampling and scoring: what a process holds of a group, and what all know of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sagecli.backends import Backbone
from sagecli.engine.advantage import combine
from sagecli.engine.rollout import Group, Sampling, Tick, Trajectories, decode, rollout
from sagecli.errors import RunStopped

if TYPE_CHECKING:
    from sagecli.config_reward import RewardConfig


@dataclass(frozen=True)
class Scored:
    """What the rewards say of B videos."""

    axes: dict[str, Tensor]
    """Axis -> [B] float64 on the CPU; NaN where scoring failed."""
    monitors: dict[str, Tensor]
    """Monitor -> [B], as the axes."""
    failures: dict[int, str]
    """Index of a video that could not be scored -> the reason."""
    details: list[dict[str, Any]] = field(default_factory=list)
    """What each reward used, by video: reward -> its details; may be empty."""


Score = Callable[[Tensor, list[str]], Scored]


@dataclass(frozen=True)
class Sampled:
    """Samples of one group, where they were made: all of it, or a process's share."""

    trajectories: Trajectories
    videos: Tensor
    """[B, F, 3, H, W] in [0, 1], on the CPU; of a round's samples only the first of each group is kept."""
    scored: Scored
    seconds: dict[str, float]
    """Time of sampling (with decoding) and of scoring."""


@dataclass(frozen=True)
class Rolled:
    """Samples of one group before they are scored."""

    trajectories: Trajectories
    videos: Tensor
    """[B, F, 3, H, W] in [0, 1], on the CPU."""
    seconds: float


def roll_out(backbone: Backbone, group: Group, sampling: Sampling, tick: Tick) -> Rolled:
    """Sample and decode a group."""
    started = time.perf_counter()
    trajectories = rollout(backbone, group, sampling, tick)
    videos = decode(backbone, trajectories.latents[-1], sampling.micro_batch)
    return Rolled(trajectories, videos, time.perf_counter() - started)


def score_rolled(rolled: Rolled, score: Score) -> Sampled:
    """Score what was sampled."""
    started = time.perf_counter()
    scored = score(rolled.videos, [rolled.trajectories.group.prompt] * len(rolled.videos))
    seconds = {"rollout_seconds": rolled.seconds, "reward_seconds": time.perf_counter() - started}
    return Sampled(rolled.trajectories, rolled.videos, scored, seconds)


@dataclass(frozen=True)
class Spread:
    """How final latents lie around their mean."""

    count: int
    mean: Tensor
    """[C, F', H', W'] float64 on the CPU."""
    squares: float
    """Sum of squared distances from the mean, over samples, mean over elements."""

    @classmethod
    def of(cls, trajectories: Trajectories) -> "Spread":
        """That of the samples' final latents."""
        final = trajectories.latents[-1].double().cpu()
        mean = final.mean(0)
        return cls(len(final), mean, float((final - mean).square().flatten(1).mean(1).sum()))


def exploration(parts: Sequence[Spread]) -> float:
    """Root mean square distance, per element, between pairs of a group's final latents, from its parts."""
    count = sum(part.count for part in parts)
    mean = torch.stack([part.mean * part.count for part in parts]).sum(0) / count
    squares = sum(part.squares + part.count * float((part.mean - mean).square().mean()) for part in parts)
    return float((2 * squares / max(count - 1, 1)) ** 0.5)


@dataclass(frozen=True)
class ScoredGroup:
    """What all processes know of a group."""

    group: Group
    scored: Scored
    reward: Tensor
    """[G] float32; NaN where scoring failed."""
    exploration: float


@dataclass(frozen=True)
class Told:
    """What a process tells of its share of a group."""

    scored: Scored
    seconds: dict[str, float]
    spread: Spread


def tell(sampled: Sampled) -> Told:
    """What the others need to know of these samples."""
    return Told(sampled.scored, sampled.seconds, Spread.of(sampled.trajectories))


def gathered(group: Group, parts: Sequence[Told], reward: "RewardConfig") -> ScoredGroup:
    """A group from what the processes that hold it told, in its samples' order."""
    scored = _joined([part.scored for part in parts])
    rewards = combine(scored.axes, reward, len(group.seeds))
    return ScoredGroup(group, scored, rewards, exploration([part.spread for part in parts]))


def _joined(parts: Sequence[Scored]) -> Scored:
    failures: dict[int, str] = {}
    first = 0
    for part in parts:
        failures |= {first + index: reason for index, reason in part.failures.items()}
        first += len(next(iter(part.axes.values())))
    return Scored(
        {name: torch.cat([part.axes[name] for part in parts]) for name in parts[0].axes},
        {name: torch.cat([part.monitors[name] for part in parts]) for name in parts[0].monitors},
        failures,
        [detail for part in parts for detail in part.details],
    )


def check_failures(groups: Sequence[ScoredGroup], max_failed: float) -> None:
    """Stop the run where more than max_failed of a round's videos could not be scored."""
    failures = [
        f"sample {index} of {group.group.prompt!r}: {reason}"
        for group in groups
        for index, reason in group.scored.failures.items()
    ]
    total = sum(len(group.reward) for group in groups)
    if len(failures) > max_failed * total:
        raise RunStopped(
            f"{len(failures)} of {total} videos could not be scored, over reward.max_failed = {max_failed:g}: "
            + "; ".join(failures[:3])
        )


def round_metrics(groups: Sequence[ScoredGroup], reward: Tensor, used: Tensor) -> dict[str, float | None]:
    """What a round's samples are like: means over the videos that could be scored, counts, exploration, times."""
    valid = reward.isfinite()
    metrics: dict[str, float | None] = {"reward": _mean(reward[valid]), "failed": int((~valid).sum())}
    metrics["dropped_groups"] = sum(not bool(part.any()) for part in used.view(len(groups), -1))
    for kind in ("axes", "monitors"):
        for name in vars(groups[0].scored)[kind]:
            values = torch.cat([vars(group.scored)[kind][name] for group in groups])
            metrics[name] = _mean(values[valid & values.isfinite()])
    metrics["reward_spread"] = float(torch.stack([_spread(group.reward) for group in groups]).mean())
    metrics["exploration"] = sum(group.exploration for group in groups) / len(groups)
    return metrics


def phase_seconds(told: Sequence[Sequence[Told]]) -> dict[str, float]:
    """How long each phase took the slowest process; told: of each process, its parts."""
    names = next(parts for parts in told if parts)[0].seconds
    return {name: max(sum(part.seconds[name] for part in parts) for parts in told) for name in names}


def _mean(values: Tensor) -> float | None:
    """Their mean; None of none."""
    return float(values.mean()) if len(values) else None


def _spread(reward: Tensor) -> Tensor:
    """Population standard deviation of a group's valid rewards, 0 where there is none."""
    valid = reward[reward.isfinite()]
    return valid.std(correction=0) if len(valid) else reward.new_zeros(())
