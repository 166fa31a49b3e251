"""AdamW, or Muon for the matrices with AdamW for the rest, under one learning rate with a linear warm-up."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from sagecli.config import OptimizerConfig


def build_optimizers(config: "OptimizerConfig", parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """The optimizers that together cover the parameters, each once."""
    matrices = [parameter for parameter in parameters if config.kind == "muon" and parameter.ndim == 2]
    others = [parameter for parameter in parameters if config.kind != "muon" or parameter.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        muon = torch.optim.Muon(
            matrices,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.muon.momentum,
            nesterov=config.muon.nesterov,
            eps=config.eps,
            ns_steps=config.muon.ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append(muon)
    if others:
        adamw = torch.optim.AdamW(
            others, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
        optimizers.append(adamw)
    return optimizers


def step(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Sequence[nn.Parameter],
    config: "OptimizerConfig",
    update: int,
) -> Tensor:
    """One update from the gradients at hand; returns their norm before clipping. `update` counts those before."""
    norm = nn.utils.clip_grad_norm_(parameters, config.grad_clip, error_if_nonfinite=False)
    if not norm.isfinite():
        return norm
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (update + 1) / max(config.warmup, 1))
        optimizer.step()
    return norm
