"""`sage inspect`: the sampler's table that a run would use, as rows, a terminal table and a figure."""

from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from sagecli.engine.sampler import Table
from sagecli.errors import UserError

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


def write_figure(table: Table, title: str, path: Path) -> None:
    """std, |b| and the equalizer's weight over the steps, as the format that the path's ending names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = pyplot.figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise UserError(f"--figure {path}: unknown picture format {path.suffix!r}; known: {', '.join(sorted(known))}")
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    trained = table.trained_steps
    for axis, (name, values) in zip(
        axes,
        {"std of the step": table.std, "|b|": table.b.abs(), "equalizer weight": table.equalizer}.items(),
        strict=True,
    ):
        axis.plot(range(len(table)), values, color="#b8bcc6", linewidth=1)
        axis.plot(trained, values[trained], "o", color="#2f6fde", markersize=4, label="SDE step")
        axis.set_xlabel("step")
        axis.set_title(name, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[2].set_yscale("symlog", linthresh=0.05)
    axes[0].legend(frameon=False)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    pyplot.close("all")
