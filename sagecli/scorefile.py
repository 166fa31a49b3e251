"""The file that `sage score` writes: one row a video, as JSON lines or as CSV with dotted columns.

A row is written whole; what a kill leaves of a last line is dropped when the file is resumed.
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sagecli.errors import RunStopped, UserError
from sagecli.rundir import write_text
from sagecli.videofiles import MANIFEST, place_of
from sagecli.videoprompts import Job

LONGEST_NAME = 240
"""Bytes; file systems take 255, and a file that is being written has a longer name than in the end."""
Row = dict[str, Any]
"""Flat: video (its absolute path), prompt, bytes, modified_ns, num_frames, fps, height, width, scores.AXIS,
REWARD.frames, REWARD.raw.AXIS, ..., settings.rewards.REWARD.OPTION, settings.weights.AXIS."""


class ScoreFile:
    """An output file, or none, and the rows it has."""

    def __init__(self, path: Path | None, force: bool, resume: bool) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is None:
            if resume:
                raise UserError("--resume completes an output file; name it with --out")
            return
        if path.suffix not in (".jsonl", ".csv"):
            raise UserError(f"--out {path}: it takes a file that ends in .jsonl or .csv")
        if path.is_dir():
            raise UserError(f"--out {path}: this is a folder; name a file")
        if path.is_symlink() and not path.exists():
            raise UserError(f"--out {path}: this link leads nowhere")
        if path.exists() and not (force or resume):
            raise UserError(f"{path} exists; --resume completes it, --force replaces it")
        _refuse_unwritable(path)
        if resume and path.exists():
            self.rows = _read(path)

    def refuse_inputs(self, inputs: Sequence[Path]) -> None:
        """UserError where the output would overwrite what is read."""
        if self.path is not None and self.path.name == MANIFEST:
            raise UserError(f"--out {self.path}: this name is that of a rollout's manifest; name another")
        for file in inputs:
            if self.path is not None and os.path.realpath(file) == os.path.realpath(self.path):
                raise UserError(f"--out {self.path}: this file is read too; name another")

    def check(self, axes: Sequence[str], settings: Row) -> None:
        """UserError where the rows that are there were scored on other axes or with other settings."""
        if not self.rows:
            return
        if _axes(self.rows[0]) != list(axes):
            given = ", ".join(_axes(self.rows[0]))
            raise UserError(f"{self.path} holds scores on {given}, not {', '.join(axes)}; name another file with --out")
        before = {key: value for key, value in self.rows[0].items() if key.startswith("settings.")}
        for key in sorted(before.keys() | settings.keys()):
            if str(before.get(key)) != str(settings.get(key)):
                name = key.removeprefix("settings.").removeprefix("rewards.")
                raise UserError(
                    f"{self.path} was scored with {name} = {before.get(key)}, not {settings.get(key)}; "
                    "name another file with --out"
                )

    def start(self) -> None:
        """Write the rows that are kept, so that the file is there and whole."""
        if self.path is not None:
            columns = list(self.rows[0]) if self.rows else []
            self.path.parent.mkdir(parents=True, exist_ok=True)
            target = self.path.resolve()  # a link to a file stays one
            write_text(target, _text(self.path, self.rows, header=bool(self.rows), columns=columns))

    def drop_replaced(self, jobs: Sequence[Job]) -> int:
        """Forget the rows of jobs whose video has been written anew since; returns how many."""
        now = {job_key(job): stamp(job.video) for job in jobs}
        kept = [row for row in self.rows if not (found := now.get(_key(row))) or found.items() <= row.items()]
        dropped = len(self.rows) - len(kept)
        self.rows = kept
        return dropped

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """Those that the file has no row of."""
        done = {_key(row) for row in self.rows}
        return [job for job in jobs if job_key(job) not in done]

    def add(self, more: Iterable[Row]) -> None:
        """Write more rows; RunStopped where the disk takes no more, and then no part of them is written."""
        rows = list(more)
        for row in rows:
            self._refuse_other_models(row)
        if self.path is not None and rows:
            text = _text(self.path, rows, header=not self.rows, columns=list((self.rows or rows)[0]))
            before = self.path.stat().st_size
            try:
                with self.path.open("a", encoding="utf-8", newline="") as file:
                    file.write(text)
            except OSError as error:
                os.truncate(self.path, before)
                raise RunStopped(f"{self.path}: {error.strerror}; --resume scores what it lacks") from None
        self.rows += rows

    def _refuse_other_models(self, row: Row) -> None:
        """Scores of two models do not compare."""
        for key, value in row.items():
            if key.endswith((".model", ".template_sha256")) and self.rows and self.rows[0].get(key, value) != value:
                raise UserError(
                    f"{self.path} was scored with {key} = {self.rows[0][key]}, not {value}; name another with --out"
                )


def _refuse_unwritable(path: Path) -> None:
    """UserError, before the work, for a place where nothing can be written."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not (existing.is_dir() or existing == path.absolute()) or not os.access(existing, os.W_OK):
        raise UserError(f"--out {path}: {existing} cannot be written to")
    if len(os.fsencode(path.name)) > LONGEST_NAME:
        raise UserError(f"--out {path.name[:20]}...: a name may have {LONGEST_NAME} bytes")


def job_key(job: Job) -> tuple[str, str]:
    """What a job is known by in a file of scores, from wherever it was named."""
    return str(place_of(job.video)), job.prompt


def _key(row: Row) -> tuple[str, str]:
    return row["video"], row["prompt"]


def stamp(video: Path) -> dict[str, int]:
    """By which a file that was written anew is known; empty where it is gone."""
    try:
        found = video.stat()
    except OSError:
        return {}
    return {"bytes": found.st_size, "modified_ns": found.st_mtime_ns}


def _axes(row: Row) -> list[str]:
    return [key.removeprefix("scores.") for key in row if key.startswith("scores.")]


def flat(row: dict[str, Any], above: str = "") -> Row:
    """Nested tables as dotted keys."""
    result: Row = {}
    for key, value in row.items():
        result |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return result


def _nested(row: Row) -> dict[str, Any]:
    """flat's inverse."""
    result: dict[str, Any] = {}
    for key, value in row.items():
        table = result
        *above, name = key.split(".")
        for part in above:
            table = table.setdefault(part, {})
        table[name] = value
    return result


def _text(path: Path, rows: Sequence[Row], header: bool, columns: Sequence[str]) -> str:
    """Lines of rows; a CSV file has the columns of its first row, JSON lines have whatever a row has."""
    if path.suffix == ".jsonl":
        return "".join(json.dumps(_nested(row), ensure_ascii=False) + "\n" for row in rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="", extrasaction="ignore")
    if header:
        writer.writeheader()
    writer.writerows(
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()} for row in rows
    )
    return text.getvalue()


def _read(path: Path) -> list[Row]:
    """Complete rows; UserError where the file is another's.

    A last line without its end is what a kill has left, perhaps cut within a letter: its video is scored again.
    """
    data = path.read_bytes()
    try:
        whole = data[: data.rfind(b"\n") + 1].decode("utf-8")
        rows = (
            [_object(json.loads(line)) for line in whole.split("\n") if line]
            if path.suffix == ".jsonl"
            else _from_csv(whole)
        )
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path} is not a file of scores ({error}); name another with --out") from None
    if not all(_is_row(row) for row in rows):
        raise UserError(f"{path} is not a file of scores; name another with --out")
    return rows


def _object(entry: Any) -> Row:
    if not isinstance(entry, dict):
        raise ValueError("a line of it is no object")
    return flat(entry)


def _is_row(row: Row) -> bool:
    texts = isinstance(row.get("video"), str) and isinstance(row.get("prompt"), str)
    return texts and bool(_axes(row)) and all(isinstance(row[f"scores.{axis}"], int | float) for axis in _axes(row))


def _from_csv(text: str) -> list[Row]:
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    broken = [None in row or None in row.values() for row in rows]
    if broken and broken.pop():  # a kill may have cut the last one within a text of several lines
        rows.pop()
    if any(broken):
        raise ValueError(f"row {broken.index(True) + 1} has not as many cells as its first line")
    return [{key: _value(key, cell) for key, cell in row.items()} for row in rows]


def _value(key: str, cell: str) -> Any:
    """A cell as it was written: texts stay texts, all else is JSON."""
    if key in ("video", "prompt"):
        return cell
    try:
        return json.loads(cell)
    except ValueError:
        return cell
