"""`sage inspect`: the sampler's table that a run would use, and what can be measured without training, to be read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from sagecli.engine.sampler import Table
from sagecli.errors import UserError
from sagecli.report.charts import COLOURS as SHADES

COLUMNS = ("sigma", "sigma_next", "a", "b", "std", "equalizer")


def rows(table: Table) -> list[dict[str, Any]]:
    """One row a step: step, sigma, sigma_next, a, b, std, equalizer."""
    return [
        {"step": step} | {name: float(getattr(table, name)[step]) for name in COLUMNS} for step in range(len(table))
    ]


def terminal_table(table: Table, title: str) -> RichTable:
    """The rows to read, with what kind of step each is."""
    shown = RichTable(
        title=title, title_justify="left", caption="mean = a * latents + b * velocity; std 0 is an ODE step"
    )
    for name in ("step", *COLUMNS, "kind"):
        shown.add_column(name, justify="left" if name == "kind" else "right")
    for row in rows(table):
        kind = "sde" if row["std"] > 0 else "ode"
        shown.add_row(str(row["step"]), *(f"{row[name]:.4f}" for name in COLUMNS), kind)
    return shown


def number_table(rows: Sequence[dict[str, Any]], title: str, caption: str) -> RichTable:
    """Rows of one shape to read."""
    shown = RichTable(title=title, title_justify="left", caption=caption, caption_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for name in columns:
        shown.add_column(name, justify="right")
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        shown.add_row(*(f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells))
    return shown


def std_rows(stds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a step of step_stds's columns."""
    return [{"step": step, **{name: std[step] for name, std in stds.items()}} for step in range(len(stds["precise"]))]


def write_figure(table: Table, title: str, path: Path) -> None:
    """std, |b| and the equalizer's weight over the steps, as the format that the path's ending names."""
    with _figure(path, 3, title) as axes:
        trained = table.trained_steps
        columns = {"std of the step": table.std, "|b|": table.b.abs(), "equalizer weight": table.equalizer}
        for axis, (name, values) in zip(axes, columns.items(), strict=True):
            axis.plot(range(len(table)), values, color="#b8bcc6", linewidth=1)
            axis.plot(trained, values[trained], "o", color=SHADES[0], markersize=4, label="SDE step")
            axis.set(xlabel="step", title=name)
        axes[2].set_yscale("symlog", linthresh=0.05)
        axes[0].legend(frameon=False)


def write_std_figure(stds: dict[str, list[float]], title: str, path: Path) -> None:
    """Figure 9's panels: every SDE; how sigma = 1 is read in the first steps; every SDE on a logarithmic scale."""
    kinds = [name for name in stds if "," not in name]
    readings = [name for name in stds if "," in name or name in ("flow", "precise")]
    with _figure(path, 3, title) as axes:
        for axis, names, count in ((axes[0], kinds, None), (axes[1], readings, 6), (axes[2], kinds, None)):
            for place, name in enumerate(names):
                axis.plot(stds[name][:count], marker="o", markersize=3, color=SHADES[place], label=name)
            axis.set(xlabel="step", ylabel="std of the step")
            axis.legend(frameon=False, fontsize=8)
        axes[1].set_title("readings of sigma = 1, first steps", fontsize=9)
        axes[2].set_yscale("log")


def write_gradient_figure(rows: Sequence[dict[str, float]], title: str, path: Path) -> None:
    """Figure 4: measured norms over sigma, and the two predictions, each divided by its geometric mean."""
    styles = {"parameters": "o", "velocity": "s", "1/std": "--", "|b|/std": "-"}
    names = {"parameters": "measured, in the parameters", "velocity": "measured, in the velocity"}
    with _figure(path, 1, title) as (axis,):
        for place, (column, style) in enumerate(styles.items()):
            label = names.get(column, f"predicted, {column}")
            sigmas, values = [row["sigma"] for row in rows], [row[column] for row in rows]
            axis.plot(sigmas, values, style, color=SHADES[place], label=label, markersize=5)
        axis.set(xlabel="sigma (1 is noise)", ylabel="norm of log_prob's gradient, relative", yscale="log")
        axis.invert_xaxis()
        axis.legend(frameon=False, fontsize=8)


def write_quality_figure(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Reward over eta of every SDE, with its last step's noise kept in the video, and without."""
    with _figure(path, 2, title) as axes:
        for axis, last_step in zip(axes, ("sde", "ode"), strict=True):
            axis.axhline(rows[0]["reward"], color="#69707d", linewidth=1, label="ode")
            kinds = list(dict.fromkeys(row["sde"] for row in rows[1:]))
            for place, kind in enumerate(kinds):
                found = [row for row in rows if row["sde"] == kind and row["last_step"] == last_step]
                etas, rewards, errors = ([row[key] for row in found] for key in ("eta", "reward", "stderr"))
                if found:
                    axis.errorbar(etas, rewards, errors, marker="o", markersize=4, color=SHADES[place], label=kind)
            kept = "kept in the video" if last_step == "sde" else "left out (the last step is an ODE step)"
            axis.set(xlabel="eta", ylabel="reward")
            axis.set_title(f"the last step's noise {kept}", fontsize=9)
            axis.legend(frameon=False, fontsize=8)


@contextmanager
def _figure(path: Path, panels: int, title: str) -> Iterator[Any]:
    """The axes of a figure that is then written in the format that the path's ending names; UserError for none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = pyplot.figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise UserError(f"--figure {path}: unknown picture format {path.suffix!r}; known: {', '.join(sorted(known))}")
    figure, axes = pyplot.subplots(
        1, panels, figsize=(11 if panels > 1 else 6, 3.4), layout="constrained", squeeze=False
    )
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    yield axes[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    pyplot.close("all")
