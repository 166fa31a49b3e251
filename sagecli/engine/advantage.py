"""From named scores to one advantage a video.

r = sum_k w_k s_k, or TaRoS's weights drawn from the group; A_i = (r_i - mean) / (std + 1e-6) within the videos of
one prompt, population std (METHOD.md section 4). A video whose scoring failed is NaN and takes no part.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sagecli.config_reward import RewardConfig, TarosConfig


def combine(axes: dict[str, Tensor], reward: "RewardConfig", group_size: int) -> Tensor:
    """One reward [B] a video from its scores (axis -> [B], grouped); NaN where a weighed score is not finite."""
    weights = {axis: weight for model in reward.models for axis, weight in model.weights.items()}
    scores = torch.stack([axes[axis].double() for axis in weights])
    valid = scores.isfinite().all(0)
    if reward.combine == "taros":
        total = _taros(axes, valid, reward.taros, group_size)
    else:
        total = (scores * torch.tensor(list(weights.values()), dtype=torch.float64)[:, None]).sum(0)
    return total.where(valid, torch.nan).float()


def _taros(axes: dict[str, Tensor], valid: Tensor, taros: "TarosConfig", group_size: int) -> Tensor:
    """Reward [B] float64: components weighted, group by group, by how high and how sparse their scores are."""
    parts = [axes[part.axis].double() for part in taros.components]
    parts = [part.sigmoid() if config.sigmoid else part for part, config in zip(parts, taros.components, strict=True)]
    scores = torch.stack(parts).where(valid, 0).view(len(parts), -1, group_size)
    count = valid.view(-1, group_size).sum(1).double()
    mean = scores.sum(2) / count.clamp(min=1)
    sparsity = hoyer_sparsity(scores, count)
    following = torch.cat([sparsity[1:], torch.zeros_like(sparsity[:1])])
    tau = torch.tensor([part.tau for part in taros.components], dtype=torch.float64)[:, None]
    gate = (mean - tau).sigmoid() + taros.beta * (sparsity - following)
    total: Tensor = (gate.softmax(0)[:, :, None] * scores).sum(0)
    return total.view(-1)


def hoyer_sparsity(scores: Tensor, count: Tensor) -> Tensor:
    """(sqrt(G) - |r|_1 / |r|_2) / (sqrt(G) - 1) over the last dimension, whose absent entries are 0.

    scores [..., G], count [...]: present entries; 0 where all are 0 or fewer than two are present.
    """
    root = count.sqrt()
    length = torch.linalg.vector_norm(scores, dim=-1)
    ratio = scores.abs().sum(-1) / length.where(length > 0, 1)
    sparsity: Tensor = (root - ratio) / (root - 1).where(count > 1, 1)
    return sparsity.where((length > 0) & (count > 1), 0)


def group_advantage(reward: Tensor, group_size: int, clip: float) -> tuple[Tensor, Tensor]:
    """Advantage of every video within its group, and which videos to learn from.

    reward [B]: grouped, NaN where scoring failed. Returns advantage [B] float32 and used [B] bool: False where the
    reward is not finite, or where the group has fewer than two valid rewards or no spread.
    """
    groups = reward.double().view(-1, group_size)  # in float32, equal rewards would seem to differ
    valid = groups.isfinite()
    count = valid.sum(1, keepdim=True).clamp(min=1)
    mean = groups.where(valid, 0).sum(1, keepdim=True) / count
    centred = (groups - mean).where(valid, 0)
    std = (centred.square().sum(1, keepdim=True) / count).sqrt()
    spread = groups.where(valid, -torch.inf).amax(1, True) > groups.where(valid, torch.inf).amin(1, True)
    advantage = (centred / (std + 1e-6)).clamp(-clip, clip)
    return advantage.float().flatten(), (valid & spread).flatten()
