"""One optimizer update: recompute the stored actions' log-probs with gradient, and step.

loss = mean over (used sample, trained step) of S_t * policy loss + lambda * (beta_pos KL_pos + beta_vel KL_vel).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sagecli.backends import Backbone
from sagecli.engine import optimizer, sampler
from sagecli.engine.batches import Batch, idle_batch
from sagecli.engine.objective import policy_loss
from sagecli.engine.processes import ALONE, Processes
from sagecli.engine.rollout import Sampling, Tick, Trajectories
from sagecli.engine.sharding import whole
from sagecli.engine.trust_region import TrustRegion
from sagecli.errors import RunStopped

if TYPE_CHECKING:
    from sagecli.config import Config

PolicyVelocities = dict[str, list[Tensor]]
"""Remembered policy -> one tensor [trained steps, m, C, F', H', W'] a batch."""


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The policy: the parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class Learner:
    """Everything that changes during a run: the policy's weights, optimizers, remembered policies, counters."""

    def __init__(self, config: "Config", backbone: Backbone, processes: Processes = ALONE) -> None:
        self.config = config
        self.processes = processes
        self.sharded = config.parallel.shard and processes.world > 1
        self.in_step = self.sharded or processes.sequence > 1
        """Whether a call of the model is one of several processes, so that all must call it equally often."""
        self.parameters = trainable(backbone.module)
        self.optimizers = optimizer.build_optimizers(config.optimizer, list(self.parameters.values()))
        self.trust_region = TrustRegion(config.trust_region, list(self.parameters.values()), config.optimizer.ema)
        self.round = 0
        """Rounds finished."""
        self.update = 0
        """Optimizer updates made."""
        self.not_finite = 0
        """Updates skipped in a row because their gradient was not finite."""
        self.between_rounds = True
        """Whether the policy is that of `round` finished rounds, and no update of the next is in it."""

    def count_not_finite(self, norm: float) -> None:
        """Count an update that is skipped; RunStopped after more of them in a row than optimizer.max_skipped."""
        self.not_finite += 1
        if self.not_finite > self.config.optimizer.max_skipped:
            raise RunStopped(
                f"the gradients of {self.not_finite} updates in a row are not finite (the last is {norm}), more than "
                f"optimizer.max_skipped = {self.config.optimizer.max_skipped}; none of them was applied"
            )

    def agreed(self, tick: Tick) -> Tick:
        """Where processes are in step, none can leave what all call together: they agree before every call."""

        def call() -> None:
            self.processes.together(tick)

        return call if self.in_step else tick

    def evaluated_policy(self) -> AbstractContextManager[None]:
        """Within the block the model acts as evaluations want it: by the moving average, where there is one."""
        return self.trust_region.acting("ema") if "ema" in self.trust_region.policies else nullcontext()


@dataclass
class Totals:
    """Sums over the (used sample, trained step) pairs of an update; tensors, so that nothing waits for the device."""

    pairs: int
    step_squares: dict[int, Tensor | float]
    """Trained step -> sum of squares of the policy loss's gradient in the velocity; empty where it is not wanted."""
    sums: dict[str, Tensor | float] = field(default_factory=dict)
    ratio_error: Tensor | float = 0.0
    """Largest |ratio - 1|."""

    def gather(self, processes: Processes) -> None:
        """Make them those of all processes."""
        mine = ({k: float(v) for k, v in self.sums.items()}, {k: float(v) for k, v in self.step_squares.items()})
        found = processes.gather((*mine, float(self.ratio_error)))
        names = dict.fromkeys(name for sums, _, _ in found for name in sums)
        self.sums = {name: sum(sums.get(name, 0.0) for sums, _, _ in found) for name in names}
        self.step_squares = {step: sum(squares[step] for _, squares, _ in found) for step in self.step_squares}
        self.ratio_error = max(error for _, _, error in found)

    def add(self, name: str, values: Tensor) -> None:
        """Add the sum of values, without gradient."""
        total = values.detach().sum()
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def add_step_gradient(self, step: int, loss: Tensor, velocity: Tensor) -> None:
        """Add the gradient of losses [m] in the velocity, which needs no pass through the model."""
        if self.step_squares and velocity.requires_grad:
            (gradient,) = torch.autograd.grad(loss.sum(), velocity, retain_graph=True)
            self.step_squares[step] += gradient.square().sum()

    def step_gradients(self, table: sampler.Table) -> list[dict[str, float]]:
        """Each trained step with the norm of that gradient, before and after the equalizer."""
        rows = []
        for step, square in self.step_squares.items():
            norm = float(square) ** 0.5
            place = {"step": step, "sigma": float(table.sigma[step])}
            rows.append(place | {"before": norm / float(table.equalizer[step]), "after": norm})
        return rows

    def means(self) -> dict[str, float]:
        """The means over the pairs, as numbers."""
        return {name: float(total) / self.pairs for name, total in self.sums.items()}


def update_policy(
    learner: Learner,
    backbone: Backbone,
    batches: list[Batch],
    sampling: Sampling,
    tick: Tick,
    spare: Trajectories | None = None,
) -> dict[str, Any]:
    """Make one update from the batches of every process; returns its metrics, the same in all.

    Without a used sample or an SDE step it is skipped. So is one whose gradient is not finite; RunStopped after more
    than optimizer.max_skipped of them in a row. spare: what a process that has fewer batches than others calls the
    model with, where they are in step.
    """
    steps = sampling.table.trained_steps
    metrics: dict[str, Any] = {"skipped": True, "lambda_kl": 0.0}
    if learner.trust_region.betas:
        metrics["lambda_kl"] = learner.trust_region.lambda_kl
    told = learner.processes.gather((int(sum(batch.weight.sum() for batch in batches)), len(batches)))
    pairs = sum(used for used, _ in told) * len(steps)
    if not pairs:  # a window may hold nothing but ODE steps
        return metrics
    if learner.in_step and spare is not None:
        most = max(count for _, count in told)
        batches = batches + [idle_batch(spare, sampling.micro_batch)] * (most - len(batches))
    every = learner.config.train.diagnose_every
    diagnosed = every > 0 and (learner.update + 1) % every == 0
    totals = Totals(pairs, dict.fromkeys(steps, 0.0) if diagnosed else {})
    norms = accumulate(learner, backbone, batches, sampling, totals, tick)
    if diagnosed:
        metrics["step_gradients"] = totals.step_gradients(sampling.table)
    norm = whole(nn.utils.clip_grad_norm_(list(learner.parameters.values()), learner.config.optimizer.grad_clip))
    if not norm.isfinite():
        learner.count_not_finite(float(norm))
        return {"skipped": True, "not_finite": True, "lambda_kl": metrics["lambda_kl"]}
    learner.not_finite = 0
    learner.trust_region.before_update()
    optimizer.step(learner.optimizers, learner.config.optimizer, learner.update)
    learner.update += 1
    learner.between_rounds = False
    learner.trust_region.after_update(learner.update)
    measured = totals.means() | norms | {"ratio_error": float(totals.ratio_error), "gradient_norm": float(norm)}
    return metrics | measured | {"skipped": False}


def accumulate(
    learner: Learner, backbone: Backbone, batches: list[Batch], sampling: Sampling, totals: "Totals", tick: Tick
) -> dict[str, float]:
    """Leave in the parameters the gradient of the loss over all processes' batches, and fill the totals.

    Returns the norms of the policy loss's and the KL's gradients, where the totals ask for them.
    """
    references = remembered_velocities(learner, backbone, batches, sampling, tick)
    gradients = Gradients(list(learner.parameters.values()), bool(totals.step_squares))
    for index, batch in enumerate(batches):
        for place, step in enumerate(sampling.table.trained_steps):
            tick()
            velocity = step_velocity(backbone, batch, step, sampling)
            policy = policy_term(learner.config, batch, step, sampling, velocity, totals)
            kl = velocity.new_zeros(())
            for name, beta in learner.trust_region.betas.items():
                values = sampler.kl(sampling.table, step, velocity, references[name][index][place]) * batch.weight
                totals.add(f"kl_{name}", values)
                totals.add("kl", beta * values)
                kl = kl + beta * values.sum()
            gradients.add(policy / totals.pairs, learner.trust_region.lambda_kl * kl / totals.pairs)
    if not learner.sharded:  # there they were summed on the way
        gradients.gather(learner.processes)
    totals.gather(learner.processes)
    return gradients.norms()


def step_velocity(backbone: Backbone, batch: Batch, step: int, sampling: Sampling) -> Tensor:
    """The model's velocity at a stored state, called exactly as the rollout called it."""
    latents = batch.trajectories.latents[step][batch.indices]
    sigma = float(sampling.table.sigma[step])
    return backbone.velocity(latents, sigma, batch.trajectories.conditioning, sampling.guidance)


@torch.no_grad()
def remembered_velocities(
    learner: Learner, backbone: Backbone, batches: list[Batch], sampling: Sampling, tick: Tick
) -> PolicyVelocities:
    """Velocities of every remembered policy at every stored state: a KL needs nothing else of it."""
    velocities: PolicyVelocities = {}
    for name in learner.trust_region.betas:
        velocities[name] = []
        with learner.trust_region.acting(name):
            for batch in batches:
                of_batch = []
                for step in sampling.table.trained_steps:
                    tick()
                    of_batch.append(step_velocity(backbone, batch, step, sampling))
                velocities[name].append(torch.stack(of_batch))
    return velocities


def policy_term(
    config: "Config", batch: Batch, step: int, sampling: Sampling, velocity: Tensor, totals: Totals
) -> Tensor:
    """Equalized policy loss of a micro-batch at one step, summed over its used samples."""
    latents = batch.trajectories.latents
    mean = sampler.mean(sampling.table, step, latents[step][batch.indices], velocity)
    log_prob = sampler.log_prob(sampling.table, step, mean, latents[step + 1][batch.indices])
    old_log_prob = batch.trajectories.log_prob[step][batch.indices]
    loss, ratio = policy_loss(log_prob, old_log_prob, batch.advantage, config.objective.clip_range)
    loss = loss * batch.weight * float(sampling.table.equalizer[step])
    error = (ratio.detach() - 1).abs() * batch.weight
    totals.add("policy_loss", loss)
    totals.add_step_gradient(step, loss, velocity)
    totals.add("ratio", ratio * batch.weight)
    totals.add("clipped", (error > config.objective.clip_range).float())
    totals.ratio_error = error.max().clamp(min=totals.ratio_error)
    return loss.sum()


class Gradients:
    """Accumulates the gradients, and apart (at the cost of a second backward pass) the KL's part when asked."""

    def __init__(self, parameters: list[nn.Parameter], apart: bool) -> None:
        self.parameters = parameters
        self.kl_part = [torch.zeros_like(parameter) for parameter in parameters] if apart else None
        for parameter in parameters:
            parameter.grad = None

    def add(self, policy: Tensor, kl: Tensor) -> None:
        """Add the gradients of one micro-batch's policy loss and weighted KL."""
        if self.kl_part is not None and kl.requires_grad:
            gradients = torch.autograd.grad(kl, self.parameters, retain_graph=True)
            for total, gradient in zip(self.kl_part, gradients, strict=True):
                total += gradient
        (policy + kl).backward()

    def gather(self, processes: Processes) -> None:
        """Sum them over the processes, of which some had nothing to add."""
        if processes.world > 1:
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            processes.add([p.grad for p in self.parameters if p.grad is not None] + (self.kl_part or []))

    def norms(self) -> dict[str, float]:
        """Norms of the two parts, where they were kept apart."""
        if self.kl_part is None:
            return {}
        whole = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        policy = [total - kl for total, kl in zip(whole, self.kl_part, strict=True)]
        norms = {"gradient_norm_policy": policy, "gradient_norm_kl": self.kl_part}
        return {name: float(nn.utils.get_total_norm(part)) for name, part in norms.items()}
