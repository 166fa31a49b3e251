"""Backbones and rewards by name: entry points, the built-in ones like any third party's."""

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from sagecli.errors import UserError, did_you_mean

Kind = Literal["backends", "rewards"]


def names(kind: Kind) -> list[str]:
    """Every installed name of a kind."""
    return sorted(point.name for point in entry_points(group=f"sagecli.{kind}"))


def load(kind: Kind, name: str) -> Any:
    """The class that an installed package registers under the name; UserError where none does."""
    point: EntryPoint | None = next(iter(entry_points(group=f"sagecli.{kind}", name=name)), None)
    if point is None:
        known = names(kind)
        raise UserError(f"no {kind[:-1]} is called {name!r}; installed: {', '.join(known)}{did_you_mean(name, known)}")
    return point.load()
