"""From prompts to trajectories: walk the sampler's table, keep every state and the log-prob of every action.

Sampling and training call the model with one micro-batch shape, the last one padded, so that on the policy that
sampled them the log-probs of stored actions come out bitwise the same (METHOD.md section 2).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sagecli.backends import Backbone, VideoSize
from sagecli.engine import sampler
from sagecli.engine.noise import gaussian, sample_seed, shuffled
from sagecli.engine.sampler import Table

if TYPE_CHECKING:
    from sagecli.config import Config

Tick = Callable[[], None]


@dataclass(frozen=True)
class Group:
    """The samples of one prompt."""

    prompt: str
    seeds: tuple[int, ...]
    """One seed a sample: its initial noise and the noise of each of its steps."""
    start: tuple[int, ...] = ()
    """Other seeds for the initial noise, where the samples share it (DanceGRPO)."""

    def part(self, samples: Sequence[int]) -> "Group":
        """The group of some of its samples."""
        start = self.start and tuple(self.start[sample] for sample in samples)
        return Group(self.prompt, tuple(self.seeds[sample] for sample in samples), start)


@dataclass(frozen=True)
class Sampling:
    """How a group is sampled."""

    table: Table
    size: VideoSize
    guidance: float
    micro_batch: int


@dataclass(frozen=True)
class Trajectories:
    """What the samples of one group went through."""

    group: Group
    conditioning: Any
    """What the backbone made of the prompt."""
    latents: Tensor
    """[T + 1, B, C, F', H', W'] float32: the initial noise, then the state after every step."""
    log_prob: Tensor
    """[T, B] float32: of each action under the policy that took it; 0 at ODE steps."""


def video_size(config: "Config") -> VideoSize:
    """The configured size of videos."""
    return VideoSize(config.video.height, config.video.width, config.video.frames)


def round_sampling(config: "Config", round: int) -> Sampling:
    """How the rollouts of a round are sampled."""
    table = sampler.build_table(config.sampler, config.objective.equalizer, round, config.train.seed)
    micro_batch = min(config.train.micro_batch, config.train.group_size)
    return Sampling(table, video_size(config), config.sampler.guidance, micro_batch)


def round_groups(config: "Config", prompts: list[str], round: int) -> list[Group]:
    """The groups of a round: prompts in an order shuffled anew each time all have been drawn."""
    count, seed = config.train.groups_per_round, config.train.seed
    groups = []
    for place in range(count):
        epoch, index = divmod(round * count + place, len(prompts))
        prompt = prompts[shuffled(len(prompts), seed, epoch)[index]]
        seeds = tuple(sample_seed(seed, round, place, sample) for sample in range(config.train.group_size))
        groups.append(Group(prompt, seeds, start_seeds(config, seeds)))
    return groups


def start_seeds(config: "Config", seeds: Sequence[int]) -> tuple[int, ...]:
    """Seeds of a group's initial noise where all of its samples start from the first one's; none else."""
    return (seeds[0],) * len(seeds) if config.sampler.shared_noise else ()


def micro_batches(size: int, micro_batch: int) -> Iterator[tuple[Tensor, int]]:
    """Indices [micro_batch] of each batch and how many of them are real; the last is padded with its last one."""
    for first in range(0, size, micro_batch):
        yield torch.arange(first, first + micro_batch).clamp(max=size - 1), min(micro_batch, size - first)


@torch.no_grad()
def rollout(backbone: Backbone, group: Group, sampling: Sampling, tick: Tick) -> Trajectories:
    """Sample a group; `tick` is called before every call of the model and may raise to abandon it."""
    conditioning = backbone.encode([group.prompt])[group.prompt]
    latents, log_probs = [], []
    for indices, count in micro_batches(len(group.seeds), sampling.micro_batch):
        seeds = [group.seeds[index] for index in indices.tolist()]
        start = group.start or group.seeds
        initial = backbone.initial_latents([start[index] for index in indices.tolist()], sampling.size)
        states, log_prob = _walk(backbone, conditioning, initial, seeds, sampling, tick)
        latents.append(states[:, :count])
        log_probs.append(log_prob[:, :count])
    return Trajectories(group, conditioning, torch.cat(latents, 1), torch.cat(log_probs, 1))


def _walk(
    backbone: Backbone, conditioning: Any, initial: Tensor, seeds: list[int], sampling: Sampling, tick: Tick
) -> tuple[Tensor, Tensor]:
    """States [T + 1, B, ...] and log-probs [T, B] of one micro-batch."""
    table = sampling.table
    states = [initial]
    log_probs = torch.zeros(len(table), len(seeds), device=initial.device, dtype=initial.dtype)
    for step in range(len(table)):
        tick()
        velocity = backbone.velocity(states[-1], float(table.sigma[step]), conditioning, sampling.guidance)
        mean = sampler.mean(table, step, states[-1], velocity)
        if table.std[step] == 0:
            states.append(mean)
            continue
        noise = torch.stack([gaussian(seed, 1 + step, tuple(mean.shape[1:])) for seed in seeds])
        states.append(mean + float(table.std[step]) * noise.to(mean.device))
        log_probs[step] = sampler.log_prob(table, step, mean, states[-1])
    return torch.stack(states), log_probs


@torch.no_grad()
def decode(backbone: Backbone, latents: Tensor, micro_batch: int) -> Tensor:
    """Videos [B, F, 3, H, W] in [0, 1] of final latents [B, ...], on the CPU."""
    return torch.cat([backbone.decode(part).cpu() for part in latents.split(micro_batch)])
