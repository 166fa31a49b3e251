"""Every sampler is three numbers a step: mean = a * latents + b * velocity, next_latents = mean + std * noise.

A kind of SDE is one function of (sigma, sigma_next) that gives b, a and the variance of the whole step (METHOD.md
section 2); a step with std 0 is an ODE step. Nothing after the table knows which SDE made it.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sagecli.engine.noise import shuffled
from sagecli.engine.schedule import sigma_schedule

if TYPE_CHECKING:
    from sagecli.config import SamplerConfig, WindowConfig

SIGMA_CAP = 0.997  # the diffusion eta^2 s / (1 - s) diverges at s = 1


@dataclass(frozen=True)
class Table:
    """A sampler: one float64 entry [T] a step."""

    sigma: Tensor
    sigma_next: Tensor
    a: Tensor
    b: Tensor
    std: Tensor
    """Noise of the whole step; 0 for an ODE step, which is neither sampled nor trained."""
    equalizer: Tensor
    """Weight of the step's policy loss; 0 for an ODE step."""
    log_prob: str
    """"gaussian", or "cps" for the unnormalised -(y - mean)^2."""

    def __len__(self) -> int:
        return len(self.sigma)

    @property
    def trained_steps(self) -> list[int]:
        """The SDE steps: those with a policy to train."""
        return self.std.nonzero().flatten().tolist()


def build_table(sampler: "SamplerConfig", equalizer: str = "off", round: int = 0, seed: int = 0) -> Table:
    """The table a round samples and trains with; round and seed place a moving window of SDE steps."""
    sigmas = sigma_schedule(sampler.steps, sampler.shift)
    sigma, sigma_next = sigmas[:-1], sigmas[1:]
    a, b, var = transition(sampler.sde, sigma, sigma_next, sampler.eta)
    sde = var > 0
    if sampler.last_step == "ode":
        sde[-1] = False
    weight = equalizer_weights(equalizer, b, var.sqrt(), sde, sampler.log_prob)
    window = torch.zeros_like(sde)
    window[sde_steps(sampler.sde_steps, sampler.steps, round, seed)] = True
    sde &= window
    ode_a, ode_b, _ = transition("ode", sigma, sigma_next, sampler.eta)
    return Table(
        sigma=sigma,
        sigma_next=sigma_next,
        a=torch.where(sde, a, ode_a),
        b=torch.where(sde, b, ode_b),
        std=var.sqrt().where(sde, 0),
        equalizer=weight.where(sde, 0),
        log_prob=sampler.log_prob,
    )


def transition(sde: str, sigma: Tensor, sigma_next: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, var) of every step, each [T] float64, for the kinds of METHOD.md section 2."""
    if sde in ("cps", "exact"):
        share = _cps_share(sigma, eta) if sde == "cps" else _exact_share(sigma, sigma_next, eta)
        var = sigma_next**2 * (1 - share**2)
        kept = sigma_next * share  # of the noise estimate; kept^2 + var = sigma_next^2
        return 1 - sigma_next + kept, -sigma * (1 - sigma_next) + (1 - sigma) * kept, var
    var = {"precise": _precise_var, "dance": _dance_var, "flow": _flow_var, "ode": _ode_var}[sde](
        sigma, sigma_next, eta
    )
    return 1 - var / (2 * sigma), sigma_next - sigma - var / 2 * (1 - sigma) / sigma, var


def _precise_var(sigma: Tensor, sigma_next: Tensor, eta: float) -> Tensor:
    """Exact integral of eta^2 s / (1 - s) over the step, both ends capped."""
    start, end = sigma.clamp(max=SIGMA_CAP), sigma_next.clamp(max=SIGMA_CAP)
    return eta**2 * (end - start + torch.log((1 - end) / (1 - start)))


def _dance_var(sigma: Tensor, sigma_next: Tensor, eta: float) -> Tensor:
    return eta**2 * (sigma - sigma_next)


def _flow_var(sigma: Tensor, sigma_next: Tensor, eta: float) -> Tensor:
    """The step's first value of eta^2 s / (1 - s), with the schedule's second sigma where s = 1."""
    return eta**2 * sigma / (1 - torch.where(sigma == 1, sigma_next, sigma)) * (sigma - sigma_next)


def _ode_var(sigma: Tensor, sigma_next: Tensor, eta: float) -> Tensor:
    return torch.zeros_like(sigma)


def _cps_share(sigma: Tensor, eta: float) -> Tensor:
    return torch.full_like(sigma, math.cos(eta * math.pi / 2))


def _exact_share(sigma: Tensor, sigma_next: Tensor, eta: float) -> Tensor:
    """rho of the exact transition with the data estimate held over the step."""
    start, end = sigma.clamp(max=SIGMA_CAP), sigma_next.clamp(max=SIGMA_CAP)
    return (end * (1 - start) / (start * (1 - end))) ** (eta**2 / 2)


def equalizer_weights(equalizer: str, b: Tensor, std: Tensor, sde: Tensor, log_prob: str) -> Tensor:
    """S = median(N) / N over the SDE-capable steps; N is the gradient's size in the velocity or the mean.

    METHOD.md section 3; the median of an even count is the lower middle one.
    """
    if equalizer == "off" or not sde.any():
        return torch.ones_like(std)
    reach = b.abs() if equalizer == "velocity" else torch.ones_like(b)
    norm = 2 * reach * std if log_prob == "cps" else reach / std
    return norm[sde].median() / norm


def sde_steps(choice: "tuple[int, ...] | WindowConfig | str", steps: int, round: int, seed: int) -> list[int]:
    """The steps that may be SDE steps in this round; a sliding window wraps to its start at the end."""
    if isinstance(choice, str):
        return list(range(steps))
    if isinstance(choice, tuple):
        return list(choice)
    places = steps - choice.size - choice.start + 1
    moves = round // choice.every
    if choice.draw == "random":
        first = choice.start + shuffled(places, seed, moves)[0]
    else:
        first = choice.start + moves * choice.stride % places
    return list(range(first, first + choice.size))


def mean(table: Table, step: int, latents: Tensor, velocity: Tensor) -> Tensor:
    """Mean of the step's transition, float32, the shape of the latents."""
    return float(table.a[step]) * latents + float(table.b[step]) * velocity


def log_prob(table: Table, step: int, mean: Tensor, next_latents: Tensor) -> Tensor:
    """Log-density [B] of next_latents, averaged over elements (nats an element)."""
    square = (next_latents - mean).square().flatten(1).mean(1)
    if table.log_prob == "cps":
        return -square
    std = float(table.std[step])
    return -square / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)


def kl(table: Table, step: int, velocity: Tensor, reference: Tensor) -> Tensor:
    """KL [B] between two policies at one step: b^2 mean((v1 - v2)^2) / (2 std^2), nats an element."""
    scale = float(table.b[step] ** 2 / (2 * table.std[step] ** 2))
    return scale * (velocity - reference).square().flatten(1).mean(1)
