"""AdamW, or Muon for the matrices with AdamW for the rest, under one learning rate with a linear warm-up."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

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


def step(optimizers: Sequence[torch.optim.Optimizer], config: "OptimizerConfig", update: int) -> None:
    """Step from the gradients at hand, clipped already; `update` counts the updates before."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (update + 1) / max(config.warmup, 1))
        optimizer.step()
