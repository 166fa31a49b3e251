"""How processes share a round: which samples each holds, sampling them, and putting together what all found."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from sagecli.backends import Backbone
from sagecli.engine.noise import shuffled
from sagecli.engine.rollout import Group, Tick, Trajectories, rollout, round_sampling
from sagecli.engine.samples import Rolled, Sampled, Score, ScoredGroup, Told, gathered, roll_out, score_rolled
from sagecli.engine.update import Learner

if TYPE_CHECKING:
    from sagecli.config import Config
    from sagecli.config_reward import RewardConfig

Share = dict[int, list[int]]
"""What a process holds of a round: group's place -> which of its samples, in order."""


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


@dataclass(frozen=True)
class Made:
    """A process's samples of a round."""

    share: Share
    own: dict[int, Sampled]
    """Group's place -> its samples."""
    spare: Trajectories | None
    """What it calls the model with when others have more to learn from; None where it has nothing and need not."""


def sample_share(
    learner: Learner, backbone: Backbone, groups: Sequence[Group], held: Sequence[Share], score: Score, tick: Tick
) -> Made:
    """Sample and score what this process holds. held: what each of them does.

    In step, all call the model equally often, and score only then: a reward may stop the run, which no process can
    while others are in a call with it.
    """
    share = held[learner.processes.rank]
    sampling = round_sampling(learner.config, learner.round)
    own: dict[int, Sampled] = {}
    waiting: dict[int, Rolled] = {}
    for place, samples in share.items():
        waiting[place] = roll_out(backbone, groups[place].part(samples), sampling, tick)
        if not learner.in_step:
            own[place] = _scored(waiting.pop(place), score)
    spare = None
    if learner.in_step:
        calls = [sum(-(-len(part) // sampling.micro_batch) for part in one.values()) for one in held]
        for _ in range(max(calls) - calls[learner.processes.rank]):
            spare = rollout(backbone, groups[0].part([0]), sampling, tick)
    own |= {place: _scored(rolled, score) for place, rolled in waiting.items()}
    return Made(share, own, next(iter(own.values())).trajectories if own else spare)


def _scored(rolled: Rolled, score: Score) -> Sampled:
    """With the first video alone: all of a round's would fill the memory."""
    sampled = score_rolled(rolled, score)
    return replace(sampled, videos=sampled.videos[:1].clone())


def merged(
    groups: Sequence[Group], told: Sequence[dict[int, Told]], held: Sequence[Share], reward: "RewardConfig"
) -> list[ScoredGroup]:
    """Every group, from what the processes told of their samples, put in order."""
    found = []
    for place, group in enumerate(groups):
        parts = {share[place][0]: said[place] for share, said in zip(held, told, strict=True) if place in said}
        found.append(gathered(group, [parts[first] for first in sorted(parts)], reward))
    return found
