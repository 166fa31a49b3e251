"""One run on one, two and three processes: the same noise, rollouts and advantages, and nearly the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_cases import cases
from distributed_start import start
from torch import Tensor

SCRIPT = Path(__file__).parent / "distributed_cases.py"


def outcomes(folder: Path, which: str, count: int) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each process found."""
    out = folder / str(count)
    out.mkdir()
    start(SCRIPT, count, which, str(out))
    return {name: [torch.load(out / f"{name}-{rank}.pt") for rank in range(count)] for name in cases(which)}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(sum((one[name].double() - other[name].double()).square().sum() for name in one)) ** 0.5


def assert_same_run(alone: dict[str, Any], shared: list[dict[str, Any]], exact: bool) -> None:
    samples = {key: value for part in shared for key, value in part["samples"].items()}
    assert sum(len(part["samples"]) for part in shared) == len(samples)  # each sample in one process
    assert samples.keys() == alone["samples"].keys()
    for key, found in alone["samples"].items():
        for mine, other in zip(samples[key], found, strict=True):  # float64 kernels depend on a row's place
            assert torch.equal(mine, other) or (exact and torch.allclose(mine, other, rtol=0, atol=1e-12))
    zeros = {name: torch.zeros_like(value) for name, value in alone["start"].items()}
    for part in shared:
        assert all(map(torch.equal, part["rewards"], alone["rewards"]))  # float32
        assert all(torch.equal(part["start"][name], value) for name, value in alone["start"].items())
        assert all(torch.equal(part["weights"][name], value) for name, value in shared[0]["weights"].items())
        if "gradients" in alone:
            off = distance(part["gradients"], alone["gradients"]) / distance(alone["gradients"], zeros)
            assert off < (1e-12 if exact else 1e-6)
        moved = distance(alone["weights"], alone["start"])
        assert moved > 0
        assert distance(part["weights"], alone["weights"]) / moved < (1e-9 if exact else 1e-2)
        assert part["lambda_kl"] == alone["lambda_kl"]
        for mine, other in zip(part["metrics"], alone["metrics"], strict=True):
            assert mine.keys() == other.keys()
            for name in ("reward", "exploration", "kl", "gradient_norm"):
                if name in other:
                    assert mine[name] == pytest.approx(other[name], rel=1e-9 if exact else 1e-2, abs=1e-12)


def test_two_processes_equal_one(tmp_path):
    alone, shared = (outcomes(tmp_path, "short", count) for count in (1, 2))
    for name in alone:
        assert_same_run(alone[name][0], shared[name], False)


@pytest.mark.distributed
def test_any_number_of_processes_equals_one(tmp_path):
    alone = outcomes(tmp_path, "all", 1)
    for count, which in ((2, "all"), (3, "exact")):
        shared = outcomes(tmp_path, which, count)
        for name, (_, exact) in cases(which).items():
            assert_same_run(alone[name][0], shared[name], exact)


@pytest.mark.distributed
def test_processes_that_share_tokens_and_samples_equal_one(tmp_path):
    """Four processes: two and two share the tokens of different samples. Rollouts are not bitwise the same."""
    alone, shared = (outcomes(tmp_path, "sequence", count) for count in (1, 4))
    for name in alone:
        for part in shared[name]:
            moved = distance(alone[name][0]["weights"], alone[name][0]["start"])
            assert distance(part["weights"], alone[name][0]["weights"]) / moved < 1e-6
            for mine, other in zip(part["metrics"], alone[name][0]["metrics"], strict=True):
                assert mine["reward"] == pytest.approx(other["reward"], rel=1e-6)
                assert mine["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-6)
