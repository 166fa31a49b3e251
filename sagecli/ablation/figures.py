"""A grid's figures for papers, as PNG and SVG: its curves, with bands of one standard deviation over seeds."""

from collections.abc import Callable, Sequence
from pathlib import Path

from sagecli.ablation.grid import Grid
from sagecli.ablation.results import CellResult
from sagecli.report.charts import colour
from sagecli.report.collect import Points, Run, exploration, kl_share, mean_and_std

LABELS = {"reward": "held-out reward", "exploration": "exploration, over the first round's", "kl_share": "KL's share"}


def write_figures(results: Sequence[CellResult], grid: Grid, out: Path) -> list[Path]:
    """One figure for each of the grid's plots that has numbers; returns the PNGs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = next((run.axes for result in results for run in result.runs), [])
    keys = [key for name in grid.plot for key in (axes if name == "axes" else [name])]
    written = []
    for key in keys:
        figure, axis = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
        drawn = [_draw(axis, result, _curve(key), colour(place)) for place, result in enumerate(results)]
        if any(drawn):
            axis.set_xlabel("update")
            axis.set_ylabel(LABELS.get(key, f"held-out {key}"))
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(frameon=False, fontsize=8)
            path = out / f"{key.replace('_', '-')}.png"
            figure.savefig(path, dpi=160)
            figure.savefig(path.with_suffix(".svg"))
            written.append(path)
        pyplot.close(figure)
    return written


def _curve(key: str) -> Callable[[Run], Points]:
    return {"exploration": exploration, "kl_share": kl_share}.get(key, lambda run: run.heldout(key))


def _draw(axis: object, result: CellResult, curve: Callable[[Run], Points], shade: str) -> bool:
    rows = mean_and_std([points for run in result.runs if (points := curve(run))])
    if not rows:
        return False
    x, mean, std = zip(*rows, strict=True)
    axis.plot(x, mean, color=shade, label=result.name, marker="o" if len(x) < 10 else None, markersize=4)  # type: ignore[attr-defined]
    low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
    axis.fill_between(x, low, high, color=shade, alpha=0.15, linewidth=0)  # type: ignore[attr-defined]
    return True
