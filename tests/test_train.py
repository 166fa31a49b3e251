"""The engine on a real HunyuanVideo-1.5 pipeline with random weights; rewards are plain functions of the pixels."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sagecli.backends.hunyuanvideo15 import HunyuanVideo15
from sagecli.config import Config
from sagecli.engine.batches import make_batches
from sagecli.engine.noise import gaussian, sample_seed, shuffled
from sagecli.engine.rollout import Group, rollout, round_groups, round_sampling
from sagecli.engine.samples import Scored, gathered, roll_out, score_rolled, tell
from sagecli.engine.sharing import update_slices
from sagecli.engine.train import train_round
from sagecli.engine.update import Learner, update_policy
from sagecli.errors import RunStopped

PROMPTS = ["a red ball", "two cats asleep", "rain on a window"]


def no_tick() -> None:
    """Nobody interrupts."""


def brightness(videos: Tensor, prompts: list[str]) -> Scored:
    return Scored({"VQ": videos.double().mean((1, 2, 3, 4))}, {}, {})


ALL_MAY_FAIL = {"models": [{"name": "shapes", "weights": {"VQ": 1.0}}], "max_failed": 1.0}


def make_config(path: Path, **sections: dict[str, Any]) -> Config:
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": str(path), "dtype": "float32", "train": "lora", "lora": {"rank": 2, "alpha": 4.0}},
        "video": {"height": 16, "width": 24, "frames": 5},
        "sampler": {"steps": 4, "guidance": 2.0, "eta": 0.8},
        "reward": {"models": [{"name": "shapes", "weights": {"VQ": 1.0}}]},
        "trust_region": {"lambda_kl": {"kind": "constant", "value": 1.0}},
        "optimizer": {"lr": 1e-2},
        "train": {"prompts": "-", "rounds": 2, "groups_per_round": 2, "group_size": 3, "micro_batch": 2},
        "eval": {"prompts": "-", "steps": 3},
    }
    for name, section in sections.items():
        tables[name] = tables.get(name, {}) | section
    return Config.model_validate(tables)


def make_backbone(config: Config) -> HunyuanVideo15:
    backbone = HunyuanVideo15(config.model, torch.device("cpu"))
    backbone.encode(PROMPTS)
    return backbone


def run(config: Config, rounds: int = 2, score: Any = brightness) -> tuple[Learner, list[dict[str, Any]]]:
    backbone = make_backbone(config)
    learner = Learner(config, backbone)
    updates = []
    for _ in range(rounds):
        updates += train_round(learner, backbone, score, PROMPTS, no_tick).updates
    return learner, updates


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8])
def test_ratio_is_exactly_one_on_policy(random_pipeline, train, micro_batch):
    config = make_config(random_pipeline, model={"train": train}, train={"micro_batch": micro_batch})
    _, updates = run(config, rounds=2)
    assert [metrics["ratio_error"] for metrics in updates] == [0.0, 0.0]
    assert [metrics["ratio"] for metrics in updates] == [1.0, 1.0]


@pytest.mark.parametrize("sde", ["precise", "dance", "flow", "cps", "exact"])
def test_every_sde_trains(random_pipeline, sde):
    learner, updates = run(
        make_config(random_pipeline, sampler={"sde": sde, "last_step": "sde"}, train={"diagnose_every": 1}), rounds=1
    )
    assert learner.update == 1
    assert updates[0]["ratio_error"] == 0
    assert updates[0]["gradient_norm_policy"] > 0


def test_gradient_is_that_of_the_stated_loss(random_pipeline):
    config = make_config(random_pipeline, trust_region={"strategy": "fixed", "beta_pos": 2.0}, train={"group_size": 4})
    backbone = make_backbone(config)
    learner = Learner(config, backbone)
    with torch.no_grad():  # away from the initial policy, so that the KL acts
        for parameter in learner.parameters.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    sampling = round_sampling(config, 0)
    group = Group(PROMPTS[0], (1, 2, 3, 4))
    trajectories = rollout(backbone, group, sampling, no_tick)
    advantage, used = torch.tensor([1.0, -0.5, 9.0, 0.25]), torch.tensor([True, True, False, True])

    table, conditioning = sampling.table, backbone.encode([group.prompt])[group.prompt]
    loss = torch.zeros(())
    with torch.no_grad(), learner.trust_region.acting("initial"):
        initials = [
            backbone.velocity(trajectories.latents[step], float(table.sigma[step]), conditioning, 2.0)
            for step in table.trained_steps
        ]
    for step, initial in zip(table.trained_steps, initials, strict=True):
        latents, taken = trajectories.latents[step], trajectories.latents[step + 1]
        velocity = backbone.velocity(latents, float(table.sigma[step]), conditioning, 2.0)
        mean = float(table.a[step]) * latents + float(table.b[step]) * velocity
        std = float(table.std[step])
        log_prob = torch.distributions.Normal(mean, std).log_prob(taken).flatten(1).mean(1)
        ratio = (log_prob - log_prob.detach()).exp()
        policy = -(advantage * ratio)[used].sum() * float(table.equalizer[step])
        kl = (mean - (float(table.a[step]) * latents + float(table.b[step]) * initial)) ** 2 / (2 * std**2)
        loss = loss + policy + 1.0 * 2.0 * kl.flatten(1).mean(1)[used].sum()
    loss = loss / (3 * len(table.trained_steps))
    expected = torch.autograd.grad(loss, list(learner.parameters.values()))

    batches = list(make_batches(trajectories, advantage, used, sampling.micro_batch))
    update_policy(learner, backbone, batches, sampling, no_tick)
    for parameter, gradient in zip(learner.parameters.values(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("strategy", ["none", "fixed", "stepwise", "moving", "dual-moving"])
def test_strategies_hold_lora_and_full_to_the_same_policies(random_pipeline, strategy, train):
    config = make_config(
        random_pipeline,
        model={"train": train},
        trust_region={"strategy": strategy, "anchor_every": 2},
        train={"diagnose_every": 1},
        optimizer={"lr": 1e-3},
    )
    learner, updates = run(config, rounds=4)
    remembered = set(learner.trust_region.betas)
    for index, metrics in enumerate(updates):
        kls = {name[3:]: value for name, value in metrics.items() if name.startswith("kl_")}
        assert set(kls) == remembered
        fresh = {"initial": index == 0, "previous": index == 0, "anchor": index in (0, 2)}
        assert {name: value == 0 for name, value in kls.items()} == {name: fresh[name] for name in remembered}
        apart = [value > 0 for value in kls.values()]
        assert (metrics["gradient_norm_kl"] > 0) == any(apart)
    assert learner.update == 4


@pytest.mark.parametrize("equalizer", ["velocity", "mean", "off"])
def test_the_diagnosis_measures_each_steps_gradient_before_and_after_the_equalizer(random_pipeline, equalizer):
    config = make_config(
        random_pipeline, objective={"equalizer": equalizer}, train={"diagnose_every": 1}, sampler={"steps": 6}
    )
    _, updates = run(config, rounds=1)
    rows = updates[0]["step_gradients"]
    table = round_sampling(config, 0).table
    assert [row["step"] for row in rows] == table.trained_steps
    predicted = [float(table.b[step].abs() / table.std[step]) for step in table.trained_steps]
    before = [row["before"] for row in rows]
    factors = [value / size for value, size in zip(before, predicted, strict=True)]
    # N = |b| / std up to one common factor, but for the noise that happened to be drawn in each step
    assert max(factors) / min(factors) < 1.3 < max(predicted) / min(predicted)
    weights = [float(table.equalizer[step]) for step in table.trained_steps]
    after = [value * weight for value, weight in zip(before, weights, strict=True)]
    assert [row["after"] for row in rows] == pytest.approx(after, rel=1e-5)
    if equalizer == "velocity":
        assert max(after) / min(after) < 1.3


def test_the_diagnosis_sees_the_anchor_and_changes_nothing(random_pipeline):
    def train(diagnose_every: int) -> tuple[Learner, list[dict[str, Any]]]:
        region = {"strategy": "moving", "anchor_every": 2, "lambda_kl": {"kind": "constant", "value": 5.0}}
        return run(
            make_config(random_pipeline, trust_region=region, train={"diagnose_every": diagnose_every}), rounds=4
        )

    learner, updates = train(2)
    assert ["gradient_norm_kl" in metrics for metrics in updates] == [False, True, False, True]
    assert all(updates[place]["gradient_norm_kl"] > 0 for place in (1, 3))
    for place in (1, 3):  # of two vectors and their sum
        parts = [updates[place][f"gradient_norm_{name}"] for name in ("policy", "kl")]
        assert abs(parts[0] - parts[1]) <= updates[place]["gradient_norm"] * 1.0001
        assert updates[place]["gradient_norm"] <= sum(parts) * 1.0001
    other, _ = train(0)
    for parameter, same in zip(learner.parameters.values(), other.parameters.values(), strict=True):
        assert torch.equal(parameter, same)


def test_with_a_lora_the_initial_policy_is_the_adapter_switched_off(random_pipeline):
    config = make_config(random_pipeline, trust_region={"strategy": "fixed"})
    backbone = make_backbone(config)
    learner = Learner(config, backbone)
    train_round(learner, backbone, brightness, PROMPTS, no_tick)
    conditioning = backbone.encode(PROMPTS[:1])[PROMPTS[0]]
    latents = backbone.initial_latents([5], round_sampling(config, 0).size)
    with torch.no_grad():
        moved = backbone.velocity(latents, 0.7, conditioning, 1.0)
        with learner.trust_region.acting("initial"):
            initial = backbone.velocity(latents, 0.7, conditioning, 1.0)
        backbone.module.disable_adapters()
        base = backbone.velocity(latents, 0.7, conditioning, 1.0)
    assert not torch.equal(moved, initial)
    assert torch.equal(initial, base)


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_failed_reward_never_reaches_a_gradient(random_pipeline, lost):
    def failing(videos: Tensor, prompts: list[str]) -> Scored:
        scores = videos.double().mean((1, 2, 3, 4))
        scores[1] = lost
        return Scored({"VQ": scores}, {}, {1: "torn"})

    config = make_config(random_pipeline, reward={"max_failed": 0.5}, train={"group_size": 4})
    learner, updates = run(config, rounds=1, score=failing)
    assert updates[0]["failed"] == 2
    assert updates[0]["gradient_norm"] > 0
    for parameter in learner.parameters.values():
        assert parameter.isfinite().all()
    reference, _ = run(config, rounds=1, score=lambda videos, prompts: _with_nan(videos))
    for name, parameter in learner.parameters.items():
        assert torch.equal(parameter, reference.parameters[name])


def _with_nan(videos: Tensor) -> Scored:
    scores = videos.double().mean((1, 2, 3, 4))
    scores[1] = math.nan
    return Scored({"VQ": scores}, {}, {1: "torn"})


def test_too_many_failures_stop_the_run(random_pipeline):
    config = make_config(random_pipeline, reward={"max_failed": 0.3}, train={"group_size": 3})
    with pytest.raises(RunStopped, match=r"2 of 6 videos.*sample 1"):
        run(config, rounds=1, score=lambda videos, prompts: _with_nan(videos))


def test_groups_without_spread_change_nothing(random_pipeline):
    def constant(videos: Tensor, prompts: list[str]) -> Scored:
        return Scored({"VQ": torch.full((len(videos),), 0.3, dtype=torch.float64)}, {}, {})

    config = make_config(random_pipeline)
    learner, updates = run(config, rounds=1, score=constant)
    start = Learner(config, make_backbone(config))
    assert updates[0]["skipped"]
    assert updates[0]["dropped_groups"] == 2
    assert learner.update == 0
    assert learner.round == 1
    for name, parameter in learner.parameters.items():
        assert torch.equal(parameter, start.parameters[name])


def test_several_updates_a_round_make_the_clip_bind(random_pipeline):
    config = make_config(
        random_pipeline,
        objective={"updates_per_round": 2, "epochs": 2, "clip_range": 1e-6},
        train={"groups_per_round": 3, "group_size": 2},
    )
    learner, updates = run(config, rounds=1)
    assert learner.update == 4
    assert updates[0]["ratio_error"] == 0
    assert all(metrics["ratio_error"] > 1e-6 for metrics in updates[1:])
    assert [metrics["clipped"] > 0 for metrics in updates] == [False, True, True, True]


def test_slices_are_disjoint_and_whole(random_pipeline):
    config = make_config(
        random_pipeline, objective={"updates_per_round": 3, "epochs": 2}, train={"groups_per_round": 7}
    )
    slices = list(update_slices(config, 4))
    assert len(slices) == 6
    for epoch in (slices[:3], slices[3:]):
        assert sorted(place for chosen in epoch for place in chosen) == list(range(7))
    assert slices[:3] != slices[3:]


def test_a_window_of_nothing_but_ode_steps_changes_nothing(random_pipeline):
    window = {"size": 1, "stride": 1}
    learner, updates = run(make_config(random_pipeline, sampler={"sde_steps": window}), rounds=4)
    assert [metrics["skipped"] for metrics in updates] == [False, False, False, True]
    assert (learner.update, learner.round) == (3, 4)


@pytest.mark.parametrize("max_skipped", [0, 1])
@pytest.mark.parametrize("first_bad", [1, 2])
def test_gradients_that_are_no_numbers_are_skipped_counted_and_at_last_stop_the_run(
    random_pipeline, monkeypatch, max_skipped, first_bad
):
    config = make_config(
        random_pipeline,
        objective={"updates_per_round": 2},
        train={"group_size": 2},
        optimizer={"lr": 1e-2, "max_skipped": max_skipped},
    )
    backbone = make_backbone(config)
    learner = Learner(config, backbone)
    velocity = backbone.velocity

    def spoiled(*arguments: Any) -> Tensor:
        spoils = torch.is_grad_enabled() and learner.update == first_bad - 1
        return velocity(*arguments) * (math.nan if spoils else 1)

    monkeypatch.setattr(backbone, "velocity", spoiled)
    updates: list[dict[str, Any]] = []

    def train() -> None:
        for _ in range(3):
            updates[:] = train_round(learner, backbone, brightness, PROMPTS, no_tick).updates

    with pytest.raises(RunStopped, match=rf"{max_skipped + 1} updates in a row are not finite \(the last is nan\)"):
        train()
    assert learner.update == first_bad - 1
    if max_skipped and first_bad == 2:  # the first round had one good update and one that was skipped
        assert [metrics.get("not_finite", False) for metrics in updates] == [False, True]
    for parameter, previous in zip(learner.parameters.values(), learner.trust_region.policies["previous"], strict=True):
        assert parameter.isfinite().all()
        assert torch.equal(parameter, previous) == (first_bad == 1)


def test_one_good_update_ends_the_count(random_pipeline, monkeypatch):
    config = make_config(random_pipeline, optimizer={"lr": 1e-2, "max_skipped": 1})
    backbone = make_backbone(config)
    learner = Learner(config, backbone)
    velocity = backbone.velocity

    def spoiled(*arguments: Any) -> Tensor:
        return velocity(*arguments) * (math.nan if torch.is_grad_enabled() and learner.round % 2 else 1)

    monkeypatch.setattr(backbone, "velocity", spoiled)
    updates = [train_round(learner, backbone, brightness, PROMPTS, no_tick).updates[0] for _ in range(6)]
    assert [metrics["skipped"] for metrics in updates] == [False, True] * 3
    assert (learner.update, learner.not_finite) == (3, 1)


def test_a_round_that_nothing_could_score_has_null_means(random_pipeline):
    def broken(videos: Tensor, prompts: list[str]) -> Scored:
        scores = torch.full((len(videos),), math.inf, dtype=torch.float64)
        return Scored({"VQ": scores}, {}, dict.fromkeys(range(len(videos)), "VQ is inf"))

    learner, updates = run(make_config(random_pipeline, reward=ALL_MAY_FAIL), rounds=1, score=broken)
    assert (updates[0]["reward"], updates[0]["VQ"], updates[0]["failed"]) == (None, None, 6)
    assert updates[0]["skipped"]
    assert learner.update == 0


def test_abandoned_round_leaves_the_policy_as_it_was(random_pipeline):
    config = make_config(random_pipeline)
    backbone = make_backbone(config)
    learner = Learner(config, backbone)
    train_round(learner, backbone, brightness, PROMPTS, no_tick)
    before = {name: parameter.detach().clone() for name, parameter in learner.parameters.items()}
    for stop_at in (1, 9, 20, 30, 40):
        calls = iter(range(1, 1000))

        def abandon(calls: Iterator[int] = calls, stop_at: int = stop_at) -> None:
            if next(calls) == stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train_round(learner, backbone, brightness, PROMPTS, abandon)
        assert learner.round == 1
        for name, parameter in learner.parameters.items():
            assert torch.equal(parameter, before[name])


def test_a_samples_noise_is_its_own(random_pipeline):
    config = make_config(random_pipeline, train={"micro_batch": 2})
    backbone = make_backbone(config)
    sampling = round_sampling(config, 0)
    together = rollout(backbone, Group(PROMPTS[0], (11, 12, 13)), sampling, no_tick)
    other = rollout(backbone, Group(PROMPTS[0], (13, 99)), sampling, no_tick)
    assert torch.equal(together.latents[:, 2], other.latents[:, 0])
    assert torch.equal(together.log_prob[:, 2], other.log_prob[:, 0])
    alone = rollout(backbone, Group(PROMPTS[0], (13,)), sampling_of(config, micro_batch=1), no_tick)
    torch.testing.assert_close(alone.latents[:, 0], together.latents[:, 2], rtol=0, atol=1e-4)


def sampling_of(config: Config, micro_batch: int) -> Any:
    return round_sampling(
        config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": micro_batch})}), 0
    )


def test_shared_noise_starts_a_group_from_one_place(random_pipeline):
    config = make_config(random_pipeline, sampler={"shared_noise": True})
    group = round_groups(config, PROMPTS, 0)[0]
    trajectories = rollout(make_backbone(config), group, round_sampling(config, 0), no_tick)
    assert torch.equal(trajectories.latents[0, 0], trajectories.latents[0, 2])
    assert not torch.equal(trajectories.latents[1, 0], trajectories.latents[1, 2])


def test_stored_log_prob_is_that_of_the_stored_action(random_pipeline):
    config = make_config(random_pipeline, sampler={"sde_steps": [1, 2]})
    backbone = make_backbone(config)
    sampling = round_sampling(config, 0)
    trajectories = rollout(backbone, Group(PROMPTS[1], (4, 5)), sampling, no_tick)
    assert (trajectories.log_prob[[0, 3]] == 0).all()
    for step in (1, 2):
        noise = torch.stack([gaussian(seed, 1 + step, tuple(trajectories.latents.shape[2:])) for seed in (4, 5)])
        std = float(sampling.table.std[step])
        expected = -(noise.double().square().flatten(1).mean(1)) / 2 - math.log(std * math.sqrt(2 * math.pi))
        torch.testing.assert_close(trajectories.log_prob[step].double(), expected, rtol=1e-5, atol=1e-5)


def test_every_prompt_is_drawn_before_any_again():
    config = make_config(Path("-"), train={"groups_per_round": 2})
    drawn = [group.prompt for round in range(6) for group in round_groups(config, PROMPTS, round)]
    for epoch in range(4):
        assert sorted(drawn[3 * epoch : 3 * epoch + 3]) == sorted(PROMPTS)
    seeds = [seed for round in range(6) for group in round_groups(config, PROMPTS, round) for seed in group.seeds]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 2**53


def test_named_noise():
    draws = torch.stack([gaussian(sample_seed(0, 0, 0, sample), 0, (4096,)) for sample in range(8)])
    assert abs(float(draws.mean())) < 0.02
    assert float(draws.std()) == pytest.approx(1, abs=0.02)
    assert float((torch.corrcoef(draws) - torch.eye(8)).abs().max()) < 0.08
    assert torch.equal(gaussian(3, 1, (5,)), gaussian(3, 1, (5,)))
    assert not torch.equal(gaussian(3, 1, (5,)), gaussian(3, 2, (5,)))
    assert sorted(shuffled(9, 1, 2)) == list(range(9))


def test_sampled_group_is_scored_in_memory(random_pipeline):
    config = make_config(random_pipeline)
    group = Group(PROMPTS[0], (1, 2))
    sampled = score_rolled(roll_out(make_backbone(config), group, round_sampling(config, 0), no_tick), brightness)
    expected = sampled.videos.double().mean((1, 2, 3, 4)).float()
    assert torch.equal(gathered(group, [tell(sampled)], config.reward).reward, expected)
