"""The table of a grid, for the terminal and for the page."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sagecli.ablation.grid import Grid
from sagecli.ablation.results import CellResult, Difference

STYLES = {"best": "bold", "second": "underline", "third": "grey50"}
"""Class of a cell on the page -> its style in the terminal."""
TITLES = {"exploration": "exploration", "kl_share": "KL's share of gradient"}


def result_table(results: Sequence[CellResult], grid: Grid, remark: str) -> dict[str, Any]:
    """{"title", "note", "columns", "rows"}: mean and standard deviation over seeds, and the difference to the first.

    A cell's "short" text is for narrow places.
    """
    keys = list(next((result.numbers for result in results if result.runs), {}))
    axes = [key for key in keys if key not in grid.columns]
    against = [f"{key} against the first" for key in grid.compare]
    columns = ["", *axes, *against, *(TITLES[column] for column in grid.columns)]
    means = {key: [float(np.mean(one.numbers[key])) if one.runs else math.nan for one in results] for key in keys}
    rows = []
    for place, result in enumerate(results):
        if not result.runs:
            reason = next(iter(result.failures.values()), "not run")
            rows.append([result.name, f"failed: {reason}", *[""] * (len(columns) - 2)])
            continue
        row: list[Any] = [result.name + (f" ({len(result.failures)} failed)" if result.failures else "")]
        row += [_number(result.numbers[key], _rank(means[key], place) if grid.ranked else "") for key in axes]
        row += [{"text": _against(place, result.differences.get(key)), "class": "number"} for key in grid.compare]
        row += [_number(result.numbers[column], "") for column in grid.columns]
        rows.append(row)
    seeds = max((len(result.runs) for result in results), default=0)
    about = f"Held-out, after training: mean ± standard deviation over {seeds} seed{'s' if seeds != 1 else ''}. "
    about += "The difference is paired by seed and prompt, with its 95 % bootstrap interval. "
    return {"title": grid.about, "note": about + remark, "columns": columns, "rows": rows}


def _number(values: Sequence[float], rank: str) -> dict[str, str]:
    mean, std = float(np.mean(values)), float(np.std(values))
    if math.isnan(mean):
        return {"text": "-", "class": "number"}
    text = f"{mean:.4f} ± {std:.4f}" if len(values) > 1 else f"{mean:.4f}"
    return {"text": text, "short": f"{mean:.3f}", "class": f"number {rank}".strip()}


def _rank(means: Sequence[float], place: int) -> str:
    """best, second, third or nothing, by how many other cells are better."""
    better = sum(other > means[place] for other in means if not math.isnan(other))
    return ("best", "second", "third")[better] if better < 3 else ""


def _against(place: int, difference: Difference | None) -> str:
    if place == 0:
        return "the first"
    if difference is None:
        return "-"
    interval = f"[{difference.low:+.4f}, {difference.high:+.4f}]"
    return f"{difference.mean:+.4f} {interval}" if difference.shown else f"not shown {interval}"
