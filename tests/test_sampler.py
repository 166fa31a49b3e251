import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sagecli.config import SamplerConfig, WindowConfig
from sagecli.engine import sampler
from sagecli.engine.sampler import Table, build_table
from sagecli.engine.schedule import sigma_schedule

CASES = json.loads((Path(__file__).parent / "cases" / "sde.json").read_text())["cases"]
STOCHASTIC = ("precise", "dance", "flow", "cps", "exact")


def table_of(sde: str, steps: int = 20, shift: float = 5.0, eta: float = 0.5, **more: object) -> Table:
    equalizer = str(more.pop("equalizer", "velocity"))
    settings = {"sde": sde, "steps": steps, "shift": shift, "eta": eta, "last_step": "sde"} | more
    return build_table(SamplerConfig.model_validate(settings), equalizer)


def case_id(case: dict[str, object]) -> str:
    return "{sde}-T{steps}-shift{shift}-eta{eta}".format(**case)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_golden_cases(case):
    table = table_of(case["sde"], case["steps"], float(case["shift"]), float(case["eta"]))

    def column(name: str) -> Tensor:
        return torch.tensor([row.get(name, 0) for row in case["rows"]], dtype=torch.float64)

    mean = table.a * column("x") + table.b * column("velocity")
    for given, name in (
        (table.sigma, "sigma"),
        (table.sigma_next, "sigma_next"),
        (table.std, "std"),
        (table.b, "d_mean_d_velocity"),
        (mean, "mean"),
        (table.equalizer, "equalizer"),
    ):
        torch.testing.assert_close(given, column(name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES[::7], ids=case_id)
def test_golden_log_probs_in_float32_tensors(case):
    table = table_of(case["sde"], case["steps"], float(case["shift"]), float(case["eta"]))
    for row in case["rows"]:
        if not row["std"]:
            continue
        x, velocity, next_x = (torch.full((2, 3, 4), row[key]) for key in ("x", "velocity", "next_x"))
        mean = sampler.mean(table, row["step"], x, velocity)
        torch.testing.assert_close(mean, torch.full_like(mean, row["mean"]), rtol=1e-5, atol=1e-5)
        log_prob = sampler.log_prob(table, row["step"], mean, next_x)
        torch.testing.assert_close(log_prob, torch.full((2,), row["log_prob"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sde", STOCHASTIC)
def test_log_prob_is_torchs_gaussian(sde):
    table = table_of(sde, last_step="ode")
    x, velocity, next_x = torch.randn(3, 2, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for step in table.trained_steps:
        mean = sampler.mean(table, step, x, velocity)
        expected = torch.distributions.Normal(mean, float(table.std[step])).log_prob(next_x).flatten(1).mean(1)
        torch.testing.assert_close(sampler.log_prob(table, step, mean, next_x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sde", STOCHASTIC)
def test_kl_is_torchs_gaussian_kl(sde):
    table = table_of(sde, last_step="ode")
    x, first, second = torch.randn(3, 2, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for step in table.trained_steps:
        policies = [
            torch.distributions.Normal(sampler.mean(table, step, x, velocity), float(table.std[step]))
            for velocity in (first, second)
        ]
        expected = torch.distributions.kl_divergence(*policies).flatten(1).mean(1)
        torch.testing.assert_close(sampler.kl(table, step, first, second), expected, rtol=1e-12, atol=1e-12)


def test_precise_variance_is_the_integral_of_the_diffusion():
    table = table_of("precise", eta=0.7)
    for step in range(1, 20):  # the first step meets the cap
        low, high = float(table.sigma_next[step]), float(table.sigma[step])
        points = torch.linspace(low, high, 200_001, dtype=torch.float64)
        integral = torch.trapezoid(0.7**2 * points / (1 - points), points)
        assert float(table.std[step]) ** 2 == pytest.approx(float(integral), rel=1e-7)


def test_exact_keeps_the_noise_level():
    table = table_of("exact", eta=1.0)
    # the mean's noise part is a + b where data = 0 and x = noise, velocity = noise: x0_hat = (1 - sigma) noise
    sigma, sigma_next = table.sigma, table.sigma_next
    x = sigma  # noise 1, data 0: x = sigma, velocity = 1, x0_hat = 0
    noise_part = table.a * x + table.b
    torch.testing.assert_close(noise_part**2 + table.std**2, sigma_next**2, rtol=1e-12, atol=1e-14)


FIGURE_9 = {
    "dance": (0.0510, 0.0532, 0.0863, 0.2282),
    "flow": (0.5000, 0.5186, 0.1929, 0.1171),
    "precise": (0.5562, 0.4256, 0.1834, 0.0795),
    "cps": (0.6997, 0.6917, 0.5682, 0),
}


@pytest.mark.parametrize("sde", FIGURE_9)
def test_figure_9(sde):
    table = table_of(sde)
    for step, expected in zip((0, 1, 10, 19), FIGURE_9[sde], strict=True):
        assert float(table.std[step]) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("steps", "shift"), [(70, 5.0), (100, 5.0), (50, 7.0), (50, 12.0)])
@pytest.mark.parametrize("sde", STOCHASTIC)
def test_schedules_that_start_above_the_cap_stay_finite(sde, steps, shift):
    table = table_of(sde, steps, shift)
    assert table.sigma_next[0] > sampler.SIGMA_CAP
    for column in (table.a, table.b, table.std, table.equalizer):
        assert column.isfinite().all()
    if sde == "precise":
        assert table.std[0] == 0
        assert table.equalizer[0] == 0
        assert 0 not in table.trained_steps


@pytest.mark.parametrize("equalizer", ["velocity", "mean"])
@pytest.mark.parametrize("log_prob", ["gaussian", "cps"])
@pytest.mark.parametrize("sde", STOCHASTIC)
def test_equalizer_is_autograds_gradient_norm(sde, log_prob, equalizer):
    if log_prob == "cps" and sde != "cps":
        pytest.skip("cps's log-prob is legal with cps alone")
    table = table_of(sde, last_step="ode", log_prob=log_prob, equalizer=equalizer)
    generator = torch.Generator().manual_seed(3)
    products = []
    for step in table.trained_steps:
        x, velocity, noise = torch.randn(3, 1, 64, 64, dtype=torch.float64, generator=generator)
        velocity.requires_grad_()
        mean = sampler.mean(table, step, x, velocity)
        log = sampler.log_prob(table, step, mean, mean.detach() + float(table.std[step]) * noise)
        (gradient,) = torch.autograd.grad(log.sum(), velocity if equalizer == "velocity" else mean)
        products.append(float(gradient.norm()) * float(table.equalizer[step]))
    assert max(products) / min(products) < 1.1  # the noise's own norm varies by a few per cent


def test_equalizer_numbers_of_the_method():
    table = table_of("precise")
    assert float(table.equalizer[0]) == pytest.approx(8.16, abs=0.005)
    assert float(table.equalizer[9]) == 1.0
    assert float(table.equalizer[19]) == pytest.approx(0.055, abs=5e-4)
    for sde, ratio in (("precise", 148), ("flow", 96), ("dance", 6.6)):
        norm = table_of(sde).b.abs() / table_of(sde).std
        assert float(norm.max() / norm.min()) == pytest.approx(ratio, rel=0.01)


def test_median_is_over_the_steps_of_the_schedule_not_of_the_window():
    whole, window = table_of("precise"), table_of("precise", sde_steps=[0, 1])
    torch.testing.assert_close(window.equalizer[:2], whole.equalizer[:2], rtol=0, atol=0)
    assert window.trained_steps == [0, 1]


@pytest.mark.parametrize("sde", ["precise", "dance", "flow", "cps", "exact", "ode"])
def test_a_last_ode_step_lands_on_the_data_estimate(sde):
    table = table_of(sde, last_step="ode")
    x, velocity = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    landed = sampler.mean(table, 19, x, velocity)
    torch.testing.assert_close(landed, x - float(table.sigma[19]) * velocity)
    assert table.std[19] == 0


def test_windows():
    def steps(round: int, **window: object) -> list[int]:
        config = SamplerConfig(steps=10, sde_steps=WindowConfig.model_validate(window), last_step="sde")
        return build_table(config, round=round, seed=5).trained_steps

    assert steps(0, size=3) == [0, 1, 2]
    assert steps(1, size=3) == [1, 2, 3]
    assert steps(7, size=3) == [7, 8, 9]
    assert steps(8, size=3) == [0, 1, 2]
    assert [steps(round, size=2, stride=2, every=3)[0] for round in range(9)] == [0, 0, 0, 2, 2, 2, 4, 4, 4]
    assert steps(9, size=2, start=4, stride=0) == [4, 5]
    drawn = [steps(round, size=2, draw="random") for round in range(200)]
    assert drawn == [steps(round, size=2, draw="random") for round in range(200)]
    assert {first for first, _ in drawn} == set(range(9))
    assert all(second == first + 1 for first, second in drawn)


def final_std(sde: str, steps: int, eta: float = 0.5) -> float:
    """Standard deviation of the samples of N(0, 0.5^2), whose exact velocity is linear, by the table's own moments."""
    table = table_of(sde, steps, eta=eta, last_step="ode")
    data_var = 0.25
    var = torch.ones((), dtype=torch.float64)
    for step in range(steps):
        sigma = table.sigma[step]
        slope = (sigma - (1 - sigma) * data_var) / ((1 - sigma) ** 2 * data_var + sigma**2)  # E[noise - data | x] / x
        var = (table.a[step] + table.b[step] * slope) ** 2 * var + table.std[step] ** 2
    return math.sqrt(float(var))


@pytest.mark.parametrize("sde", ["ode", "precise", "exact", "dance"])
def test_first_order_convergence_on_gaussian_data(sde):
    errors = [final_std(sde, steps) - 0.5 for steps in (40, 80)]
    assert 1.7 < errors[0] / errors[1] < 2.3


def test_cps_loses_variance_however_many_steps():
    errors = [final_std("cps", steps) - 0.5 for steps in (40, 80, 160)]
    assert all(error < -0.05 for error in errors)
    assert errors[0] / errors[1] < 1.4


def test_schedule_matches_its_closed_form():
    sigmas: Tensor = sigma_schedule(4, 3.0)
    expected = [1, 3 * 0.75 / 2.5, 3 * 0.5 / 2, 3 * 0.25 / 1.5, 0]
    assert sigmas.tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("shift", [0.1, 0.2, 0.3, 1.0, 5.0, 9.9])
def test_the_schedule_begins_at_exactly_one(shift):
    assert float(sigma_schedule(8, shift)[0]) == 1.0
    table = build_table(SamplerConfig(sde="flow", shift=shift, steps=8))
    assert float(table.std[0]) < 10
