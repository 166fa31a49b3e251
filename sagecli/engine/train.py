"""The SAGE-GRPO loop, one round: rollout, scores, advantages, updates.

GRPO for flow matching, with three differences: the sampler's table may hold a precise SDE; every step's policy loss is
weighted by the equalizer; and a KL holds the policy near a moving anchor and near the policy before the last update.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sagecli.backends import Backbone
from sagecli.engine import sampler
from sagecli.engine.advantage import combine, group_advantage
from sagecli.engine.noise import sample_seed, shuffled
from sagecli.engine.rollout import (
    Group,
    Sampling,
    Tick,
    Trajectories,
    decode,
    rollout,
    round_groups,
    round_sampling,
    video_size,
)
from sagecli.engine.update import Learner, make_batches, update_policy
from sagecli.errors import RunStopped

if TYPE_CHECKING:
    from sagecli.config import Config


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
    """One group after sampling and scoring."""

    trajectories: Trajectories
    videos: Tensor
    """[B, F, 3, H, W] in [0, 1], on the CPU; of a round's groups only the first is kept."""
    scored: Scored
    reward: Tensor
    """[B] float32; NaN where scoring failed."""
    seconds: dict[str, float]
    """Time of sampling (with decoding) and of scoring."""


@dataclass(frozen=True)
class Round:
    """What one round did."""

    number: int
    groups: list[Sampled]
    updates: list[dict[str, Any]]
    """The metrics of every update, in order."""


def sample_group(
    config: "Config", backbone: Backbone, group: Group, sampling: Sampling, score: Score, tick: Tick
) -> Sampled:
    """Roll out, decode and score one group."""
    started = time.perf_counter()
    trajectories = rollout(backbone, group, sampling, tick)
    videos = decode(backbone, trajectories.latents[-1], sampling.micro_batch)
    sampled = time.perf_counter()
    scored = score(videos, [group.prompt] * len(group.seeds))
    reward = combine(scored.axes, config.reward, len(group.seeds))
    seconds = {"rollout_seconds": sampled - started, "reward_seconds": time.perf_counter() - sampled}
    return Sampled(trajectories, videos, scored, reward, seconds)


def train_round(learner: Learner, backbone: Backbone, score: Score, prompts: list[str], tick: Tick) -> Round:
    """One round. `tick` is called before every call of the model, and an exception of its abandons the round whole.

    After the round's first update `tick` is not called any more: such a round is finished.
    """
    config = learner.config
    sampling = round_sampling(config, learner.round)
    groups = []
    for group in round_groups(config, prompts, learner.round):
        sampled = sample_group(config, backbone, group, sampling, score, tick)
        groups.append(replace(sampled, videos=sampled.videos[:1].clone()))
    check_failures(groups, config.reward.max_failed)
    size = config.train.group_size
    reward = torch.cat([group.reward for group in groups])
    advantage, used = group_advantage(reward, size, config.objective.advantage_clip)
    advantages, useds = advantage.split(size), used.split(size)
    shared = round_metrics(groups, reward, used)
    updates: list[dict[str, Any]] = []
    for chosen in update_slices(config, learner.round):
        started = time.perf_counter()
        batches = [
            batch
            for place in chosen
            for batch in make_batches(groups[place].trajectories, advantages[place], useds[place], sampling.micro_batch)
        ]
        metrics = update_policy(learner, backbone, batches, sampling, tick)
        tick = tick if metrics["skipped"] else _no_tick
        head = {"round": learner.round, "update": learner.update}
        updates.append(head | shared | metrics | {"update_seconds": time.perf_counter() - started})
    kls = [metrics["kl"] for metrics in updates if "kl" in metrics]
    if kls:
        learner.trust_region.after_round(sum(kls) / len(kls))
    learner.round += 1
    learner.between_rounds = True
    return Round(learner.round - 1, groups, updates)


def _no_tick() -> None:
    """Between a round's updates there is nothing to abandon."""


def update_slices(config: "Config", round: int) -> Iterator[list[int]]:
    """The groups of every update: all of them, or disjoint shuffled slices, `epochs` times over."""
    count, slices = config.train.groups_per_round, config.objective.updates_per_round
    for epoch in range(config.objective.epochs):
        order = list(range(count)) if slices == 1 else shuffled(count, config.train.seed, round, epoch)
        for number in range(slices):
            yield order[number * count // slices : (number + 1) * count // slices]


def check_failures(groups: list[Sampled], max_failed: float) -> None:
    """Stop the run where more than max_failed of a round's videos could not be scored."""
    failures = [failure for group in groups for failure in named_failures(group)]
    total = sum(len(group.reward) for group in groups)
    if len(failures) > max_failed * total:
        raise RunStopped(
            f"{len(failures)} of {total} videos could not be scored, over reward.max_failed = {max_failed:g}: "
            + "; ".join(failures[:3])
        )


def named_failures(sample: Sampled) -> list[str]:
    """One sentence for every video of the group that could not be scored."""
    prompt = sample.trajectories.group.prompt
    return [f"sample {index} of {prompt!r}: {reason}" for index, reason in sample.scored.failures.items()]


def round_metrics(groups: list[Sampled], reward: Tensor, used: Tensor) -> dict[str, float | None]:
    """What a round's samples are like: means over the videos that could be scored, counts, exploration, times."""
    valid = reward.isfinite()
    metrics: dict[str, float | None] = {"reward": _mean(reward[valid]), "failed": int((~valid).sum())}
    metrics["dropped_groups"] = sum(not bool(part.any()) for part in used.view(len(groups), -1))
    for kind in ("axes", "monitors"):
        for name in vars(groups[0].scored)[kind]:
            values = torch.cat([vars(group.scored)[kind][name] for group in groups])
            metrics[name] = _mean(values[valid & values.isfinite()])
    metrics["reward_spread"] = float(torch.stack([_spread(group.reward) for group in groups]).mean())
    metrics["exploration"] = sum(exploration(group.trajectories) for group in groups) / len(groups)
    for name in groups[0].seconds:
        metrics[name] = sum(group.seconds[name] for group in groups)
    return metrics


def _mean(values: Tensor) -> float | None:
    """Their mean; None of none."""
    return float(values.mean()) if len(values) else None


def _spread(reward: Tensor) -> Tensor:
    """Population standard deviation of a group's valid rewards, 0 where there is none."""
    valid = reward[reward.isfinite()]
    return valid.std(correction=0) if len(valid) else reward.new_zeros(())


def exploration(trajectories: Trajectories) -> float:
    """Root mean square distance, per element, between pairs of a group's final latents."""
    return float((2 * trajectories.latents[-1].var(0).mean()).sqrt())


def evaluate(config: "Config", backbone: Backbone, score: Score, prompts: list[str], tick: Tick) -> Iterator[Sampled]:
    """Held-out prompts sampled by the ODE from fixed seeds, one group a prompt."""
    ode = {"sde": "ode", "steps": config.eval.steps, "sde_steps": "all", "log_prob": "gaussian"}
    table = sampler.build_table(config.sampler.model_copy(update=ode))
    micro_batch = min(config.train.micro_batch, len(config.eval.seeds))
    sampling = Sampling(table, video_size(config), config.eval.guidance, micro_batch)
    for place, prompt in enumerate(prompts):
        seeds = tuple(sample_seed(seed, 0, place, 0) for seed in config.eval.seeds)
        yield sample_group(config, backbone, Group(prompt, seeds), sampling, score, tick)
