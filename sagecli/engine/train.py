"""The SAGE-GRPO loop, one round: rollout, scores, advantages, updates.

GRPO for flow matching, with three differences: the sampler's table may hold a precise SDE; every step's policy loss is
weighted by the equalizer; and a KL holds the policy near a moving anchor and near the policy before the last update.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sagecli.backends import Backbone
from sagecli.engine import sampler
from sagecli.engine.advantage import group_advantage
from sagecli.engine.batches import Batch, make_batches
from sagecli.engine.noise import sample_seed
from sagecli.engine.rollout import Group, Sampling, Tick, round_groups, round_sampling, video_size
from sagecli.engine.samples import (
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
from sagecli.engine.sharing import Made, Share, merged, sample_share, shares, update_slices
from sagecli.engine.update import Learner, update_policy
from sagecli.interrupt import Interrupted


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
    config, processes, number = learner.config, learner.processes, learner.round
    sampling = round_sampling(config, number)
    groups = round_groups(config, prompts, number)
    held = shares(config, number, processes.count)
    tick = learner.agreed(tick)
    made: list[Made] = []

    def sample() -> dict[int, Told]:
        made.append(sample_share(learner, backbone, groups, held, score, tick))
        return {place: tell(sampled) for place, sampled in made[0].own.items()}

    told = processes.together(sample)
    scored = merged(groups, told, held, config.reward)
    check_failures(scored, config.reward.max_failed)
    reward = torch.cat([group.reward for group in scored])
    advantage, used = group_advantage(reward, config.train.group_size, config.objective.advantage_clip)
    shared = round_metrics(scored, reward, used) | phase_seconds([list(parts.values()) for parts in told])
    if processes.world > 1 and not learner.in_step:
        tick = _patient(tick)
    updates = []
    for metrics in learn(learner, backbone, made[0], (advantage, used), sampling, tick):
        updates.append({"round": number, "update": learner.update} | shared | metrics)
    kls = [metrics["kl"] for metrics in updates if "kl" in metrics]
    if kls:
        learner.trust_region.after_round(sum(kls) / len(kls))
    learner.round += 1
    learner.between_rounds = True
    return Round(number, scored, made[0].own, made[0].share, updates)


def learn(
    learner: Learner,
    backbone: Backbone,
    made: Made,
    advantages: tuple[Tensor, Tensor],
    sampling: Sampling,
    tick: Tick,
) -> Iterator[dict[str, Any]]:
    """A round's updates; yields the metrics of each. advantages: those of all samples, and which of them count."""
    size = learner.config.train.group_size
    advantage, used = (values.split(size) for values in advantages)
    for chosen in update_slices(learner.config, learner.round):
        started = time.perf_counter()
        batches: list[Batch] = []
        for place in chosen:
            if place in made.own:
                own = made.share[place]
                trajectories = made.own[place].trajectories
                batches += make_batches(trajectories, advantage[place][own], used[place][own], sampling.micro_batch)
        metrics = update_policy(learner, backbone, batches, sampling, tick, made.spare)
        tick = tick if metrics["skipped"] else _no_tick
        yield metrics | {"update_seconds": time.perf_counter() - started}


def _no_tick() -> None:
    """Between a round's updates there is nothing to abandon."""


def _patient(tick: Tick) -> Tick:
    """A tick that abandons nothing: one process alone must not leave what the others are in."""

    def call() -> None:
        with suppress(Interrupted):
            tick()

    return call


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
