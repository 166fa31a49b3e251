"""The one exception that reaches users as a sentence."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input or something missing: the CLI prints the sentence and exits with code 2."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


class RunStopped(Exception):
    """A run that cannot go on: the CLI prints the sentence and exits with code 1; what was saved stays."""
