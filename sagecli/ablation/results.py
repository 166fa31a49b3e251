"""What a grid's finished runs show: means over seeds, and each cell's paired difference to the first.

The difference is paired by training seed and held-out prompt; its interval is a bootstrap over both. A difference whose
interval holds 0 is not shown to be one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sagecli.report.collect import Run, exploration, kl_share, read_run
from sagecli.rundir import read_jsonl, round_name

DRAWS = 10_000
COVERAGE = 0.95
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Difference:
    """A cell minus the first one, of one number."""

    mean: float
    low: float
    high: float
    """The bootstrap interval of 95 %."""

    @property
    def shown(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class CellResult:
    """A cell's finished runs."""

    name: str
    runs: list[Run]
    failures: dict[int, str]
    """Seed -> why its run ended early."""
    numbers: dict[str, list[float]]
    """reward, axes and columns -> one value a run."""
    differences: dict[str, Difference]
    """reward and axes -> the difference to the first cell; empty for the first."""


def paired_bootstrap(differences: Numbers) -> Difference:
    """differences [seeds, prompts]: resampled with replacement over seeds and over prompts, both."""
    generator = np.random.default_rng(0)
    seeds, prompts = differences.shape
    seed_counts = generator.multinomial(seeds, np.full(seeds, 1 / seeds), DRAWS) / seeds
    prompt_counts = generator.multinomial(prompts, np.full(prompts, 1 / prompts), DRAWS) / prompts
    means = np.einsum("ds,sp,dp->d", seed_counts, differences, prompt_counts, optimize=True)
    tail = 100 * (1 - COVERAGE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return Difference(float(differences.mean()), float(low), float(high))


def cell_results(
    runs: dict[str, dict[int, Path]], failures: dict[str, dict[int, str]], columns: Sequence[str]
) -> list[CellResult]:
    """runs: cell -> seed -> folder of a finished run, the first cell first."""
    results = []
    first: dict[int, dict[str, dict[str, float]]] = {}
    for place, (name, folders) in enumerate(runs.items()):
        read = {seed: read_run(path, f"{name}, seed {seed}") for seed, path in folders.items()}
        scores = {seed: final_scores(run) for seed, run in read.items()}
        if place == 0:
            first = scores
        keys = ["reward", *(next(iter(read.values())).axes if read else [])]
        numbers = {key: [run.heldout(key)[-1][1] for run in read.values()] for key in keys}
        numbers |= {column: [_column(run, column) for run in read.values()] for column in columns}
        differences = {key: found for key in keys if place and (found := _difference(scores, first, key))}
        results.append(CellResult(name, list(read.values()), failures.get(name, {}), numbers, differences))
    return results


def final_scores(run: Run) -> dict[str, dict[str, float]]:
    """reward and axes -> prompt -> mean over the evaluation's seeds, of the last evaluation."""
    folder = run.path / "evaluations" / round_name(run.evaluations[-1]["round"])
    table: dict[str, dict[str, list[float]]] = {}
    for row in read_jsonl(folder / "scores.jsonl"):
        for key, value in ({"reward": row["reward"]} | row["axes"]).items():
            if value is not None:
                table.setdefault(key, {}).setdefault(row["prompt"], []).append(value)
    return {key: {prompt: sum(values) / len(values) for prompt, values in of.items()} for key, of in table.items()}


def _difference(
    scores: dict[int, dict[str, dict[str, float]]], first: dict[int, dict[str, dict[str, float]]], key: str
) -> Difference | None:
    """Over the seeds and prompts that both have; None without any."""
    seeds = sorted(set(scores) & set(first))
    both = [scores[seed].get(key, {}).keys() & first[seed].get(key, {}).keys() for seed in seeds]
    prompts = sorted(set.intersection(*map(set, both))) if both else []
    if not prompts:
        return None
    table = [[scores[seed][key][prompt] - first[seed][key][prompt] for prompt in prompts] for seed in seeds]
    return paired_bootstrap(np.asarray(table))


def _column(run: Run, column: str) -> float:
    """exploration: its last fifth's mean; kl_share: its mean; nan where it was not measured."""
    values = [value for _, value in (exploration(run) if column == "exploration" else kl_share(run))]
    part = values[-max(1, len(values) // 5) :] if column == "exploration" else values
    return sum(part) / len(part) if part else float("nan")


def write_results(path: Path, results: Sequence[CellResult], facts: dict[str, Any]) -> None:
    """results.json: every number of the table."""
    cells = {}
    for result in results:
        numbers = {
            key: {"mean": float(np.mean(values)), "std": float(np.std(values)), "runs": values}
            for key, values in result.numbers.items()
            if values and np.isfinite(values).all()
        }
        differences = {key: vars(one) | {"shown": one.shown} for key, one in result.differences.items()}
        cells[result.name] = {"numbers": numbers, "difference_to_first": differences, "failures": result.failures}
    path.write_text(json.dumps(facts | {"cells": cells}, indent=1) + "\n", encoding="utf-8")
