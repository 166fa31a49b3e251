"""A grid as data: cells of settings, read from a packaged or a user's own .toml file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import tomli
from pydantic import Field, ValidationError, model_validator

from sagecli import registry
from sagecli.config import Config
from sagecli.config_base import Count, Finite, Section
from sagecli.errors import UserError, did_you_mean
from sagecli.loading import load_config
from sagecli.prompts import read_text

COLUMNS = ("exploration", "kl_share")
"""What a table may show of each cell beside the reward and its axes."""


class Cell(Section):
    """One thing that is tried."""

    name: Annotated[str, Field(min_length=1)]
    set: dict[str, Any] = Field(default_factory=dict)
    """Dotted key -> value, as --set takes them."""
    weights: dict[str, Finite] = Field(default_factory=dict)
    """Axis -> weight, in place of the preset's."""
    embedded: dict[str, Any] = Field(default_factory=dict)
    """In place of `set`'s values of the same keys, on the embedded model."""


class Grid(Section):
    """A whole ablation."""

    about: str
    note: str = ""
    embedded_note: str = ""
    """What is said in its place on the embedded model."""
    seeds: Count = 3
    ranked: bool = False
    """Whether the table marks the best, second and third of each column."""
    plot: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("reward",)
    """reward, axes (each of them), an axis, a monitor, exploration, kl_share."""
    compare: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("reward",)
    """Of what the table shows each cell's difference to the first; rewards of other weights do not compare."""
    columns: Annotated[tuple[str, ...], Field(strict=False)] = ()
    set: dict[str, Any] = Field(default_factory=dict)
    """Of every cell."""
    embedded: dict[str, Any] = Field(default_factory=dict)
    """Of every cell, on the embedded model."""
    cells: Annotated[tuple[Cell, ...], Field(min_length=1, strict=False)]

    @model_validator(mode="after")
    def _names(self) -> "Grid":
        names = [cell.name for cell in self.cells]
        if twins := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two cells are called {min(twins)!r}")
        if unknown := [column for column in self.columns if column not in COLUMNS]:
            raise ValueError(f"columns has {unknown[0]!r}; there are {', '.join(COLUMNS)}")
        return self


@dataclass(frozen=True)
class PlannedCell:
    """A cell on a preset: what its runs are told."""

    name: str
    overrides: list[str]
    """"a.b=value", without the seed."""
    config: Config
    """With seed 0."""


def grid_names() -> list[str]:
    """Names of the packaged grids."""
    folder = files("sagecli.presets") / "ablations"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_grid(name: str) -> Grid:
    """A packaged grid, or that of a .toml file; UserError, one sentence, for everything wrong in it."""
    if name.endswith(".toml"):
        text, source = read_text(Path(name)), name
    elif name in grid_names():
        text, source = (files("sagecli.presets") / "ablations" / f"{name}.toml").read_text(encoding="utf-8"), name
    else:
        known = grid_names()
        hint = did_you_mean(name, known) or "; a grid of your own is given as its path, ending in .toml"
        raise UserError(f"unknown ablation {name!r}; there are {', '.join(known)}{hint}")
    try:
        return Grid.model_validate(tomli.loads(text))
    except tomli.TOMLDecodeError as error:
        raise UserError(f"{source}, line {error.lineno}: not TOML ({error.msg})") from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        reason = str(problem.get("ctx", {}).get("error", problem["msg"]))
        raise UserError(f"{source}: {key + ': ' if key else ''}{reason[0].lower() + reason[1:]}") from None


def plan(grid: Grid, preset: str, overrides: Sequence[str]) -> list[PlannedCell]:
    """Every cell's settings, checked; what the grid sets comes after the overrides, and the cell's own last."""
    embedded = load_config(preset, overrides).model.path == "tiny"
    cells = []
    for cell in grid.cells:
        settings = grid.set | (grid.embedded if embedded else {}) | cell.set | (cell.embedded if embedded else {})
        given = [*overrides, *(f"{key}={_inline(value)}" for key, value in settings.items())]
        if cell.weights:
            given.append(f"reward.models={_inline(_weighed(load_config(preset, given), cell))}")
        try:
            cells.append(PlannedCell(cell.name, given, load_config(preset, given)))
        except UserError as error:
            raise UserError(f"cell {cell.name!r}: {error}") from None
    _check_names(grid, cells[0].config)
    return cells


def _check_names(grid: Grid, config: Config) -> None:
    """UserError for something to plot or compare that these rewards do not give."""
    axes = [axis for model in config.reward.models for axis in model.weights]
    monitors = [name for model in config.reward.models for name in registry.load("rewards", model.name).monitors]
    for key, names, more in (
        ("plot", grid.plot, ["axes", "exploration", "kl_share", *monitors]),
        ("compare", grid.compare, []),
    ):
        known = ["reward", *axes, *more]
        if unknown := [name for name in names if name not in known]:
            raise UserError(f"{key} has {unknown[0]!r}; with these rewards there are {', '.join(known)}")


def _weighed(config: Config, cell: Cell) -> list[dict[str, Any]]:
    """The configured rewards with the cell's weights; UserError for an axis that none of them weighs."""
    models = [model.model_dump() for model in config.reward.models]
    for axis, weight in cell.weights.items():
        owners = [model for model in models if axis in model["weights"]]
        if not owners:
            known = [name for model in models for name in model["weights"]]
            raise UserError(
                f"cell {cell.name!r}: no reward of this preset weighs {axis!r}; they weigh {', '.join(known)}"
            )
        owners[0]["weights"][axis] = weight
    return models


def _inline(value: Any) -> str:
    """A value as TOML on one line; JSON's strings, numbers and booleans are TOML's too."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
