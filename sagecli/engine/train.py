"""The SAGE-GRPO loop, one round: rollout, scores, advantages, updates.

GRPO for flow matching, with three differences: the sampler's table may hold a precise SDE; every step's policy loss is
weighted by the equalizer; and a KL holds the policy near a moving anchor and near the policy before the last update.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from sagecli.backends import Backbone
from sagecli.engine import sampler
from sagecli.engine.advantage import group_advantage
from sagecli.engine.noise import sample_seed, shuffled
from sagecli.engine.rollout import Group, Sampling, Tick, decode, rollout, round_groups, round_sampling, video_size
from sagecli.engine.samples import (
    Sampled,
    Score,
    ScoredGroup,
    Told,
    check_failures,
    gathered,
    phase_seconds,
    round_metrics,
    tell,
)
from sagecli.engine.update import Learner, make_batches, update_policy
from sagecli.interrupt import Interrupted

if TYPE_CHECKING:
    from sagecli.config import Config

Share = dict[int, list[int]]
"""What a process holds of a round: group's place -> which of its samples, in order."""


@dataclass(frozen=True)
class Round:
    """What one round did."""

    number: int
    groups: list[ScoredGroup]
    own: dict[int, Sampled]
    """Group's place -> this process's samples of it."""
    share: Share
    updates: list[dict[str, Any]]
    """The metrics of every update, in order."""


def sample_group(backbone: Backbone, group: Group, sampling: Sampling, score: Score, tick: Tick) -> Sampled:
    """Roll out, decode and score one group."""
    started = time.perf_counter()
    trajectories = rollout(backbone, group, sampling, tick)
    videos = decode(backbone, trajectories.latents[-1], sampling.micro_batch)
    sampled = time.perf_counter()
    scored = score(videos, [group.prompt] * len(group.seeds))
    seconds = {"rollout_seconds": sampled - started, "reward_seconds": time.perf_counter() - sampled}
    return Sampled(trajectories, videos, scored, seconds)


def train_round(learner: Learner, backbone: Backbone, score: Score, prompts: list[str], tick: Tick) -> Round:
    """One round. `tick` is called before every call of the model, and an exception of its abandons the round whole.

    After the round's first update `tick` is not called any more: such a round is finished. Of several processes each
    samples and learns from its share; they agree on abandoning a round when its scores are gathered, not later.
    """
    config, processes = learner.config, learner.processes
    sampling = round_sampling(config, learner.round)
    groups = round_groups(config, prompts, learner.round)
    share = shares(config, learner.round, processes.count)[processes.rank]
    own: dict[int, Sampled] = {}

    def sample() -> dict[int, Told]:
        told = {}
        for place, samples in share.items():
            sampled = sample_group(backbone, groups[place].part(samples), sampling, score, tick)
            own[place] = replace(sampled, videos=sampled.videos[:1].clone())
            told[place] = tell(sampled)
        return told

    told = processes.together(sample)
    scored = [
        gathered(group, [parts[place] for parts in told if place in parts], config.reward)
        for place, group in enumerate(groups)
    ]
    check_failures(scored, config.reward.max_failed)
    size = config.train.group_size
    reward = torch.cat([group.reward for group in scored])
    advantage, used = group_advantage(reward, size, config.objective.advantage_clip)
    advantages, useds = advantage.split(size), used.split(size)
    shared = round_metrics(scored, reward, used) | phase_seconds([list(parts.values()) for parts in told])
    tick = tick if processes.count == 1 else _patient(tick)
    updates: list[dict[str, Any]] = []
    for chosen in update_slices(config, learner.round):
        started = time.perf_counter()
        batches = [
            batch
            for place in chosen
            if place in own
            for batch in make_batches(
                own[place].trajectories,
                advantages[place][share[place]],
                useds[place][share[place]],
                sampling.micro_batch,
            )
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
    return Round(learner.round - 1, scored, own, share, updates)


def _no_tick() -> None:
    """Between a round's updates there is nothing to abandon."""


def _patient(tick: Tick) -> Tick:
    """A tick that abandons nothing: one process alone must not leave what the others are in."""

    def call() -> None:
        with suppress(Interrupted):
            tick()

    return call


def update_slices(config: "Config", round: int) -> Iterator[list[int]]:
    """The groups of every update: all of them, or disjoint shuffled slices, `epochs` times over."""
    count, slices = config.train.groups_per_round, config.objective.updates_per_round
    for epoch in range(config.objective.epochs):
        order = list(range(count)) if slices == 1 else shuffled(count, config.train.seed, round, epoch)
        for number in range(slices):
            yield order[number * count // slices : (number + 1) * count // slices]


def shares(config: "Config", round: int, processes: int) -> list[Share]:
    """What each process holds of a round: of every update's samples (in the first epoch) an equal run."""
    found: list[Share] = [{} for _ in range(processes)]
    for chosen in islice(update_slices(config, round), config.objective.updates_per_round):
        samples = [(place, sample) for place in sorted(chosen) for sample in range(config.train.group_size)]
        for rank, share in enumerate(found):
            first, end = rank * len(samples) // processes, (rank + 1) * len(samples) // processes
            for place, sample in samples[first:end]:
                share.setdefault(place, []).append(sample)
    return [dict(sorted(share.items())) for share in found]


def evaluate(
    config: "Config", backbone: Backbone, score: Score, prompts: dict[int, str], tick: Tick
) -> Iterator[tuple[int, Sampled, ScoredGroup]]:
    """Held-out prompts (place -> text) sampled by the ODE from fixed seeds, one group a prompt."""
    ode = {"sde": "ode", "steps": config.eval.steps, "sde_steps": "all", "log_prob": "gaussian"}
    table = sampler.build_table(config.sampler.model_copy(update=ode))
    micro_batch = min(config.train.micro_batch, len(config.eval.seeds))
    sampling = Sampling(table, video_size(config), config.eval.guidance, micro_batch)
    for place, prompt in prompts.items():
        group = Group(prompt, tuple(sample_seed(seed, 0, place, 0) for seed in config.eval.seeds))
        sampled = sample_group(backbone, group, sampling, score, tick)
        yield place, sampled, gathered(group, [tell(sampled)], config.reward)
