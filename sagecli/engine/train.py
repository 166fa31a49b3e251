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
from sagecli.engine.rollout import (
    Group,
    Sampling,
    Tick,
    Trajectories,
    rollout,
    round_groups,
    round_sampling,
    video_size,
)
from sagecli.engine.samples import (
    Rolled,
    Sampled,
    Score,
    ScoredGroup,
    Told,
    check_failures,
    gathered,
    phase_seconds,
    roll_out,
    round_metrics,
    score_rolled,
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


def train_round(learner: Learner, backbone: Backbone, score: Score, prompts: list[str], tick: Tick) -> Round:
    """One round. `tick` is called before every call of the model, and an exception of its abandons the round whole.

    After the round's first update `tick` is not called any more: such a round is finished. Of several processes each
    samples and learns from its share; they agree on abandoning a round when its scores are gathered, not later.
    """
    config, processes = learner.config, learner.processes
    sampling = round_sampling(config, learner.round)
    groups = round_groups(config, prompts, learner.round)
    everyones = shares(config, learner.round, processes.count)
    share = everyones[processes.rank]
    own: dict[int, Sampled] = {}
    told_here: dict[int, Told] = {}
    spare: Trajectories | None = None
    tick = learner.agreed(tick)

    def keep(place: int, rolled: Rolled) -> None:
        sampled = score_rolled(rolled, score)
        told_here[place] = tell(sampled)
        own[place] = replace(sampled, videos=sampled.videos[:1].clone())

    def sample() -> dict[int, Told]:
        nonlocal spare
        waiting = []
        for place, samples in share.items():
            rolled = roll_out(backbone, groups[place].part(samples), sampling, tick)
            if learner.in_step:
                waiting.append((place, rolled))  # a reward that stops the run must not do so between model calls
            else:
                keep(place, rolled)
        if learner.in_step:  # all processes call the model equally often
            calls = [sum(-(-len(part) // sampling.micro_batch) for part in held.values()) for held in everyones]
            for _ in range(max(calls) - calls[processes.rank]):
                spare = rollout(backbone, groups[0].part([0]), sampling, tick)
        for place, rolled in waiting:
            keep(place, rolled)
        return told_here

    told = processes.together(sample)
    scored = []
    for place, group in enumerate(groups):
        held = [(everyones[rank][place][0], parts[place]) for rank, parts in enumerate(told) if place in parts]
        scored.append(gathered(group, [part for _, part in sorted(held, key=lambda entry: entry[0])], config.reward))
    spare = next(iter(own.values())).trajectories if own else spare
    check_failures(scored, config.reward.max_failed)
    size = config.train.group_size
    reward = torch.cat([group.reward for group in scored])
    advantage, used = group_advantage(reward, size, config.objective.advantage_clip)
    advantages, useds = advantage.split(size), used.split(size)
    shared = round_metrics(scored, reward, used) | phase_seconds([list(parts.values()) for parts in told])
    if processes.world > 1 and not learner.in_step:
        tick = _patient(tick)
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
        metrics = update_policy(learner, backbone, batches, sampling, tick, spare)
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
    shared = 0
    for chosen in islice(update_slices(config, round), config.objective.updates_per_round):
        samples = [(place, sample) for place in sorted(chosen) for sample in range(config.train.group_size)]
        for number, (place, sample) in enumerate(samples):  # small slices begin where the one before ended
            rank = (number * processes // len(samples) + shared) % processes
            found[rank].setdefault(place, []).append(sample)
        shared += len(samples)
    return [dict(sorted(share.items())) for share in found]


def evaluate(
    learner: Learner, backbone: Backbone, score: Score, prompts: dict[int, str], tick: Tick
) -> Iterator[tuple[int, Sampled, ScoredGroup]]:
    """Held-out prompts (place -> text) sampled by the ODE from fixed seeds, one group a prompt."""
    config, tick = learner.config, learner.agreed(tick)
    ode = {"sde": "ode", "steps": config.eval.steps, "sde_steps": "all", "log_prob": "gaussian"}
    table = sampler.build_table(config.sampler.model_copy(update=ode))
    micro_batch = min(config.train.micro_batch, len(config.eval.seeds))
    sampling = Sampling(table, video_size(config), config.eval.guidance, micro_batch)
    groups = {
        place: Group(prompt, tuple(sample_seed(seed, 0, place, 0) for seed in config.eval.seeds))
        for place, prompt in prompts.items()
    }
    rolled = ((place, roll_out(backbone, group, sampling, tick)) for place, group in groups.items())
    for place, one in list(rolled) if learner.in_step else rolled:
        sampled = score_rolled(one, score)
        yield place, sampled, gathered(groups[place], [tell(sampled)], config.reward)
