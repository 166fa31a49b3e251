"""What `sage inspect` measures on a model without training it: gradients by noise level, quality of rollouts."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from sagecli.backends import Backbone
from sagecli.engine import sampler
from sagecli.engine.advantage import combine
from sagecli.engine.noise import sample_seed
from sagecli.engine.rollout import Group, Sampling, Tick, decode, rollout, video_size
from sagecli.engine.samples import Score
from sagecli.engine.update import trainable

if TYPE_CHECKING:
    from sagecli.config import Config, SamplerConfig

KINDS = ("precise", "dance", "flow", "cps", "exact")


def whole_sampler(config: "SamplerConfig", sde: str, last_step: str, eta: float) -> "SamplerConfig":
    """The configured sampler with another SDE in every step."""
    change = {"sde": sde, "last_step": last_step, "eta": eta, "sde_steps": "all", "log_prob": "gaussian"}
    return config.model_validate(config.model_dump() | change)


def step_stds(config: "SamplerConfig") -> dict[str, list[float]]:
    """Figure 9: std of every step, of every SDE that takes the configured eta, and of other readings of sigma = 1.

    "flow, capped" takes sigma / (1 - sigma) at min(sigma, 0.997); "precise, second sigma" starts from sigma_1 in place
    of 1, which makes its first step an ODE step. (METHOD.md section 2.)
    """
    kinds = [kind for kind in KINDS if kind != "cps" or config.eta <= 1]
    stds = {
        kind: sampler.build_table(whole_sampler(config, kind, "sde", config.eta), "off").std.tolist() for kind in kinds
    }
    table = sampler.build_table(whole_sampler(config, "flow", "sde", config.eta), "off")
    capped = table.sigma.clamp(max=sampler.SIGMA_CAP)
    flow = config.eta**2 * capped / (1 - capped) * (table.sigma - table.sigma_next)
    start = torch.cat([table.sigma_next[:1], table.sigma[1:]])
    _, _, var = sampler.transition("precise", start, table.sigma_next, config.eta)
    return stds | {"flow, capped": flow.sqrt().tolist(), "precise, second sigma": var.sqrt().tolist()}


def gradient_norms(
    config: "Config", backbone: Backbone, prompt: str, samples: int, tick: Tick
) -> list[dict[str, float]]:
    """Figure 4: a row a step of the configured SDE: the norm of log_prob's gradient, measured and predicted.

    measured: by autograd through the model, in its trained parameters and in the velocity, means over the samples.
    predicted: 1 / std, the paper's statement, and |b| / std. Each column is divided by its geometric mean.
    """
    table = sampler.build_table(whole_sampler(config.sampler, config.sampler.sde, "sde", config.sampler.eta), "off")
    sampling = Sampling(table, video_size(config), config.sampler.guidance, 1)
    seeds = tuple(sample_seed(config.train.seed, 0, 0, sample) for sample in range(samples))
    trajectories = rollout(backbone, Group(prompt, seeds), sampling, tick)
    parameters = list(trainable(backbone.module).values())
    rows = []
    for step in table.trained_steps:
        in_parameters, in_velocity = [], []
        for sample in range(samples):
            tick()
            latents, taken = (trajectories.latents[place][sample : sample + 1] for place in (step, step + 1))
            velocity = backbone.velocity(
                latents, float(table.sigma[step]), trajectories.conditioning, sampling.guidance
            )
            log_prob = sampler.log_prob(table, step, sampler.mean(table, step, latents, velocity), taken)
            gradients = torch.autograd.grad(log_prob.sum(), [velocity, *parameters], allow_unused=True)
            in_velocity.append(float(gradients[0].norm()))
            reached = [gradient for gradient in gradients[1:] if gradient is not None]
            in_parameters.append(float(torch.nn.utils.get_total_norm(reached)))
        std, reach = float(table.std[step]), float(table.b[step].abs())
        row = {
            "parameters": fmean(in_parameters),
            "velocity": fmean(in_velocity),
            "1/std": 1 / std,
            "|b|/std": reach / std,
        }
        rows.append({"step": step, "sigma": float(table.sigma[step])} | row)
    for column in ("parameters", "velocity", "1/std", "|b|/std"):
        middle = math.exp(fmean(math.log(row[column]) for row in rows))
        for row in rows:
            row[column] /= middle
    return rows


def rollout_quality(
    config: "Config", backbone: Backbone, score: Score, prompts: Sequence[str], etas: Sequence[float], tick: Tick
) -> list[dict[str, Any]]:
    """The reward of rollouts by every SDE, eta and last step, against ODE rollouts from the same noise.

    A row: sde, eta, last_step, reward, difference (paired by prompt) and its standard error; the first row is the ODE.
    """
    base = _rewards(
        config, whole_sampler(config.sampler, "ode", "ode", config.sampler.eta), backbone, score, prompts, tick
    )
    rows: list[dict[str, Any]] = [{"sde": "ode", "eta": 0.0, "last_step": "ode", "reward": fmean(base)}]
    for kind in KINDS:
        for eta in etas:
            if kind == "cps" and eta > 1:
                continue
            for last_step in ("sde", "ode"):
                if kind in ("cps", "exact") and last_step == "sde":
                    continue  # their last step is an ODE step by itself
                chosen = whole_sampler(config.sampler, kind, last_step, eta)
                rewards = _rewards(config, chosen, backbone, score, prompts, tick)
                differences = torch.tensor(rewards, dtype=torch.float64) - torch.tensor(base, dtype=torch.float64)
                numbers = {"reward": fmean(rewards), "difference": float(differences.mean())}
                numbers["stderr"] = float(differences.std() / len(differences) ** 0.5)
                rows.append({"sde": kind, "eta": eta, "last_step": last_step} | numbers)
    return rows


def _rewards(
    config: "Config",
    chosen: "SamplerConfig",
    backbone: Backbone,
    score: Score,
    prompts: Sequence[str],
    tick: Tick,
) -> list[float]:
    """The mean reward of each prompt's videos, from the evaluation's seeds."""
    micro_batch = min(config.train.micro_batch, len(config.eval.seeds))
    sampling = Sampling(sampler.build_table(chosen, "off"), video_size(config), config.sampler.guidance, micro_batch)
    rewards = []
    for place, prompt in enumerate(prompts):
        seeds = tuple(sample_seed(seed, 0, place, 0) for seed in config.eval.seeds)
        trajectories = rollout(backbone, Group(prompt, seeds), sampling, tick)
        videos = decode(backbone, trajectories.latents[-1], micro_batch)
        reward = combine(score(videos, [prompt] * len(seeds)).axes, config.reward, len(seeds))
        rewards.append(float(reward.nanmean()))
    return rewards
