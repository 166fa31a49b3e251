"""AdamW, or Muon for the matrices with AdamW for the rest, under one learning rate with a linear warm-up."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sagecli.engine.sharding import part_of, whole

if TYPE_CHECKING:
    from sagecli.config import OptimizerConfig


def build_optimizers(config: "OptimizerConfig", parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """The optimizers that together cover the parameters, each once."""
    matrices = [parameter for parameter in parameters if config.kind == "muon" and parameter.ndim == 2]
    others = [parameter for parameter in parameters if config.kind != "muon" or parameter.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        kind = SplitMuon if isinstance(matrices[0], DTensor) else torch.optim.Muon
        muon = kind(
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


class SplitMuon(torch.optim.Muon):
    """Muon of matrices that are split over processes.

    The momentum is kept in parts. What it orthogonalizes is gathered, one matrix at a time, because in bfloat16 the
    iteration on parts gives other numbers; torch's own Muon does it, as a step of a matrix of zeros.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of every matrix; every process calls it."""
        for group in self.param_groups:
            momentum, rest = group["momentum"], {key: group[key] for key in ("eps", "ns_steps", "adjust_lr_fn")}
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = parameter.grad.lerp(buffer, momentum) if group["nesterov"] else buffer
                zeros = nn.Parameter(torch.zeros_like(gathered := whole(update)))
                zeros.grad = gathered
                torch.optim.Muon([zeros], lr=group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, **rest).step()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(part_of(zeros.data, parameter))


def step(optimizers: Sequence[torch.optim.Optimizer], config: "OptimizerConfig", update: int) -> None:
    """Step from the gradients at hand, clipped already; `update` counts the updates before."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (update + 1) / max(config.warmup, 1))
        optimizer.step()
