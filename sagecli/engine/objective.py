"""The loss: mean of max(-A ratio, -A clip(ratio)) * S_t, plus lambda * (beta_pos KL_pos + beta_vel KL_vel).

Means run over the (used sample, trained step) pairs of an update (METHOD.md sections 3 to 5).
"""

import torch
from torch import Tensor


def policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """Clipped policy loss [B] and the ratio [B]; old_log_prob is what the rollout stored."""
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantage * ratio, -advantage * clipped), ratio
