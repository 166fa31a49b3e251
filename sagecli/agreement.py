"""How often a reward agrees with people who compared two videos (VideoGen-RewardBench; METHOD.md section 7).

d = score(video_a) - score(video_b). Without ties: over pairs with a preference, the share with the preference's sign; a
model's tie counts as wrong. With ties: |d| <= eps predicts "same", with the eps, among all |d|, that agrees most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sagecli.errors import UserError
from sagecli.videoprompts import Job, table

PREFERENCES = {"a": 1, "b": -1, "same": 0}
OVERALL = "Overall"


@dataclass(frozen=True)
class Pair:
    """Two videos of one prompt."""

    first: Job
    second: Job
    preferences: dict[str, int]
    """Dimension -> 1 where people preferred the first, -1 the second, 0 neither."""


@dataclass(frozen=True)
class Agreement:
    """A reward against people, in one dimension."""

    pairs: int
    preferred: int
    """Pairs in which people preferred one."""
    without_ties: float | None
    """None where there is no such pair."""
    with_ties: float
    eps: float


def read_pairs(file: Path, dimensions: Sequence[str]) -> list[Pair]:
    """Pairs of a .csv or .jsonl file with the columns video_a, video_b, prompt and at least one dimension's.

    Videos are relative to the file. UserError for a missing column, a missing video or another preference.
    """
    rows = table(file, ("video_a", "video_b", "prompt"), dimensions)
    if not rows:
        raise UserError(f"{file}: no pair in this file; it needs at least one")
    given = [name for name in dimensions if name in rows[0]]
    if not given:
        raise UserError(f"{file}: no column of preferences; these rewards have {', '.join(dimensions)}")
    pairs = []
    for row in rows:
        first, second = (Job(file.parent / row[name], row["prompt"]) for name in ("video_a", "video_b"))
        if missing := [job.video for job in (first, second) if not job.video.is_file()]:
            raise UserError(f"{file}: {missing[0]} is no file")
        pairs.append(Pair(first, second, {name: _preference(row[name], file, name) for name in given}))
    return pairs


def _preference(cell: str, file: Path, name: str) -> int:
    if cell.lower() not in PREFERENCES:
        raise UserError(f"{file}: {name} is {cell!r}; it takes A, B or same")
    return PREFERENCES[cell.lower()]


def agreement(human: Sequence[int], differences: Sequence[float]) -> Agreement:
    """human: 1, -1 or 0 for each of at least one pair; differences: the model's d, finite."""
    order = np.argsort(np.abs(differences), kind="stable")
    people, size = np.asarray(human)[order], np.abs(differences)[order]
    right, same = people * np.sign(differences)[order] > 0, people == 0
    agreeing = np.cumsum(same) - np.cumsum(right) + right.sum()  # with eps = size
    agreeing[np.append(size[:-1] == size[1:], False)] = -1  # not yet all pairs of that size
    best = int(np.argmax(agreeing))
    preferred = int((~same).sum())
    return Agreement(
        pairs=len(human),
        preferred=preferred,
        without_ties=int(right.sum()) / preferred if preferred else None,
        with_ties=int(agreeing[best]) / len(human),
        eps=float(size[best]),
    )
