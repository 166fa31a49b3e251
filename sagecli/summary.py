"""Before against after on held-out prompts: the numbers of summary.json.

The standard error is that of the paired difference (same prompt, same seed), seeds averaged within a prompt first,
because videos of one prompt are not independent.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from torch import Tensor

from sagecli.engine.samples import ScoredGroup

Rows = list[dict[str, Any]]
"""One row a held-out video: prompt, seed, reward, axes, monitors; null where scoring failed."""


def sample_rows(sample: ScoredGroup, seeds: Sequence[int]) -> Rows:
    """One row a video of a group: prompt, seed, reward, axes, monitors; null where scoring failed."""
    return [
        {
            "prompt": sample.group.prompt,
            "seed": seed,
            "reward": finite(sample.reward[index]),
            "axes": {name: finite(values[index]) for name, values in sample.scored.axes.items()},
            "monitors": {name: finite(values[index]) for name, values in sample.scored.monitors.items()},
        }
        for index, seed in enumerate(seeds)
    ]


def finite(value: Tensor) -> float | None:
    """The number, or None where it is NaN or infinite: what JSON can hold."""
    return float(value) if value.isfinite() else None


def means(rows: Rows) -> dict[str, float | None]:
    """Means of the reward, every axis and every monitor over the videos that have them; null without any."""
    columns = {"reward": [row["reward"] for row in rows]}
    for kind in ("axes", "monitors"):
        columns |= {name: [row[kind][name] for row in rows] for name in rows[0][kind]}
    present = {name: [value for value in values if value is not None] for name, values in columns.items()}
    return {name: sum(values) / len(values) if values else None for name, values in present.items()}


def compare(before: Rows, after: Rows, kind: str, name: str) -> dict[str, float | None]:
    """{"before", "after", "stderr"} of one number over the videos that have it in both; null without any."""
    pairs = []
    for row, other in zip(before, after, strict=True):
        first, second = _value(row, kind, name), _value(other, kind, name)
        if first is not None and second is not None:
            pairs.append((row["prompt"], first, second))
    if not pairs:
        return {"before": None, "after": None, "stderr": None}
    differences = defaultdict(list)
    for prompt, first, second in pairs:
        differences[prompt].append(second - first)
    means = [fmean(values) for values in differences.values()]
    stderr = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return {
        "before": fmean(first for _, first, _ in pairs),
        "after": fmean(second for _, _, second in pairs),
        "stderr": stderr,
    }


def _value(row: dict[str, Any], kind: str, name: str) -> float | None:
    value = row[kind] if kind == "reward" else row[kind][name]
    return None if value is None else float(value)


def summarize(before: Rows, after: Rows) -> dict[str, Any]:
    """The comparison of the reward, every axis and every monitor."""
    return {
        "reward": compare(before, after, "reward", "reward"),
        "axes": {name: compare(before, after, "axes", name) for name in before[0]["axes"]},
        "monitors": {name: compare(before, after, "monitors", name) for name in before[0]["monitors"]},
    }
