"""What a page shows of runs: their settings, metrics and evaluations, read from their folders."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sagecli.errors import UserError
from sagecli.rundir import read_jsonl, round_name

Points = list[tuple[float, float]]
"""(update, value), in order."""


@dataclass(frozen=True)
class Run:
    """One run folder."""

    name: str
    path: Path
    settings: dict[str, Any]
    """Dotted key -> value."""
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    axes: list[str] = field(default_factory=list)
    """Those with a weight, in the configuration's order."""

    def trained(self, key: str) -> Points:
        """A metric over updates, where it was measured."""
        return _points(self.metrics, key)

    def heldout(self, key: str) -> Points:
        """A held-out mean over updates."""
        return _points(self.evaluations, key)

    @property
    def monitors(self) -> list[str]:
        """Names of what evaluations measure beside the axes."""
        known = {"round", "update", "failed", "reward", *self.axes}
        first = self.evaluations[0] if self.evaluations else {}
        return [key for key in first if key not in known and not key.endswith("_seconds")]

    def videos(self) -> list[tuple[str, Path, Path]]:
        """(prompt, before, after) of the held-out videos that both the first and the last evaluation kept."""
        if not self.evaluations:
            return []
        folders = [self.path / "evaluations" / round_name(self.evaluations[place]["round"]) for place in (0, -1)]
        rows = read_jsonl(folders[0] / "scores.jsonl")
        seeds = max(1, len(self.settings.get("eval.seeds", [0])))
        prompts = [row["prompt"] for row in rows[::seeds]]
        names = [file.name for file in sorted(folders[0].glob("*.mp4")) if (folders[1] / file.name).is_file()]
        return [(prompts[int(Path(name).stem)], folders[0] / name, folders[1] / name) for name in names]


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone, drawn as one curve with a band; or a single run."""

    name: str
    runs: list[Run]


def read_run(path: Path, name: str | None = None) -> Run:
    """A run folder, finished or not; UserError where it is none or has nothing to show yet."""
    if not (path / "config.toml").is_file():
        raise UserError(f"{path} is not a run folder: it has no config.toml")
    config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    axes = [axis for model in config["reward"]["models"] for axis in model["weights"]]
    run = Run(
        name=name or path.resolve().name,
        path=path,
        settings=_flat(config),
        metrics=read_jsonl(path / "metrics.jsonl"),
        evaluations=read_jsonl(path / "evaluations.jsonl"),
        axes=axes,
    )
    if not run.metrics and not run.evaluations:
        raise UserError(f"{path} has nothing to show yet: no update and no evaluation is finished")
    return run


def _flat(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return flat


def _points(rows: Sequence[dict[str, Any]], key: str) -> Points:
    """A number of several rows; of one update with several rows, the last."""
    found = {row["update"]: row[key] for row in rows if isinstance(row.get(key), int | float)}
    return sorted(found.items())


def mean_and_std(curves: Sequence[Points]) -> list[tuple[float, float, float]]:
    """(update, mean, population std) where every curve has a value."""
    shared = set.intersection(*({x for x, _ in curve} for curve in curves)) if curves else set()
    tables = [dict(curve) for curve in curves]
    rows = []
    for x in sorted(shared):
        values = [table[x] for table in tables]
        mean = sum(values) / len(values)
        rows.append((x, mean, (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5))
    return rows


def kl_share(run: Run) -> Points:
    """The KL part's share of the gradient's norm, where both parts were measured."""
    policy, kl = dict(run.trained("gradient_norm_policy")), dict(run.trained("gradient_norm_kl"))
    return [(x, kl[x] / (kl[x] + policy[x])) for x in sorted(set(policy) & set(kl)) if kl[x] + policy[x] > 0]


def exploration(run: Run) -> Points:
    """Distance between the latents of a group, over its value in the first round."""
    points = run.trained("exploration")
    return [(x, value / points[0][1]) for x, value in points] if points and points[0][1] else []


def step_gradients(run: Run) -> dict[float, tuple[float, float]]:
    """sigma -> mean norm of the policy loss's gradient in the velocity, before and after the equalizer."""
    sums: dict[float, list[tuple[float, float]]] = {}
    for row in run.metrics:
        for entry in row.get("step_gradients", []):
            sums.setdefault(entry["sigma"], []).append((entry["before"], entry["after"]))
    return {
        sigma: (sum(b for b, _ in pairs) / len(pairs), sum(a for _, a in pairs) / len(pairs))
        for sigma, pairs in sorted(sums.items(), reverse=True)
    }
