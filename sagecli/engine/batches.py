"""Micro-batches that an update learns from, in the shape that sampled them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sagecli.engine.rollout import Trajectories, micro_batches


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one group, in the shape that sampled it."""

    trajectories: Trajectories
    indices: Tensor
    """[m]: which samples of the group; a used one stands in for padding and for samples that are not used."""
    advantage: Tensor
    """[m] float32."""
    weight: Tensor
    """[m]: 1 where the sample counts, 0 where it stands in."""


def make_batches(trajectories: Trajectories, advantage: Tensor, used: Tensor, micro_batch: int) -> Iterator[Batch]:
    """The micro-batches of a group that hold a used sample; advantage [G] float32, used [G] bool."""
    device = trajectories.latents.device
    for indices, count in micro_batches(len(used), micro_batch):
        weight = used[indices] & (torch.arange(len(indices)) < count)
        if not weight.any():
            continue
        stand_in = indices[weight][0]
        indices = indices.where(weight, stand_in)
        yield Batch(trajectories, indices.to(device), advantage[indices].to(device), weight.float().to(device))


def idle_batch(trajectories: Trajectories, micro_batch: int) -> Batch:
    """A batch that counts for nothing."""
    zeros = torch.zeros(micro_batch, device=trajectories.latents.device)
    return Batch(trajectories, zeros.long(), zeros, zeros)
