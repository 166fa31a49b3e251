"""A training loop for the embedded checkpoint's two networks: Muon on matrices, AdamW on the rest, EMA, resumable.

Convolution kernels count as matrices [out, -1]. Every step draws from a generator seeded by (seed, step), so an
interrupted training continues as if it had not been.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Plan:
    """How long and how fast a network trains."""

    steps: int
    lr: float  # of both optimizers: Muon's updates are scaled to the size of AdamW's
    seed: int
    ema: float = 0.998
    warmup: int = 50
    save_every: int = 100

    def lr_scale(self, step: int) -> float:
        """Linear warm-up, a plateau of half the steps, then linear decay to zero."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / (0.5 * self.steps))


class MuonAdamW:
    """torch.optim.Muon on matrices and flattened kernels, torch.optim.AdamW on everything else."""

    def __init__(self, module: nn.Module, lr: float):
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.lr = lr
        self.kernels = [p for p in trained if p.ndim >= 2]
        # Muon takes 2-D parameters only: these share the kernels' storage, so a step on them moves the kernels.
        self.flat = [nn.Parameter(p.detach().view(p.shape[0], -1)) for p in self.kernels]
        rest = [p for p in trained if p.ndim < 2]
        self.muon = torch.optim.Muon(self.flat, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, scale: float) -> None:
        for kernel, flat in zip(self.kernels, self.flat, strict=True):
            flat.grad = None if kernel.grad is None else kernel.grad.reshape(flat.shape)
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * scale
            optimizer.step()
        for parameter in self.kernels:
            parameter.grad = None
        self.adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


def save_atomically(state: dict, file: Path) -> None:
    beside = file.with_name(f"{file.name}.partial")
    torch.save(state, beside)
    os.replace(beside, file)


def train(module: nn.Module, loss: Callable[[torch.Generator, int], dict[str, Tensor]], plan: Plan, file: Path) -> None:
    """Minimises loss(generator, step)["loss"], then leaves the EMA weights in the module.

    file: where the state is kept; a finished state is loaded without training, an unfinished one goes on.
    """
    optimizer = MuonAdamW(module, plan.lr)
    ema = {name: value.detach().clone() for name, value in module.state_dict().items()}
    start = 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        ema, start = state["ema"], state["step"]
    began = time.monotonic()
    for step in range(start, plan.steps):
        parts = loss(torch.Generator().manual_seed(plan.seed * 1_000_003 + step), step)
        parts["loss"].backward()
        optimizer.step(plan.lr_scale(step))
        decay = min(plan.ema, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(ema.values()), list(module.state_dict().values()), 1 - decay)
        done = step + 1
        if done % 50 == 0 or done == plan.steps:
            seconds = (time.monotonic() - began) / (done - start)
            numbers = "  ".join(f"{name} {float(value.detach()):.5f}" for name, value in parts.items())
            print(f"{file.stem} {done}/{plan.steps}  {seconds:.3f} s a step  {numbers}", flush=True)
        if done % plan.save_every == 0 or done == plan.steps:
            state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "ema": ema, "step": done}
            save_atomically(state, file)
    module.load_state_dict(ema)
