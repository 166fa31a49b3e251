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

from sagecli.errors import UserError
from sagecli.rundir import write_text
from sagecli.videofiles import MANIFEST
from sagecli.videoprompts import Job

Row = dict[str, Any]
"""Flat: video, prompt, num_frames, fps, height, width, scores.AXIS, REWARD.frames, REWARD.raw.AXIS, ...,
settings.rewards.REWARD.OPTION, settings.weights.AXIS."""


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
            if self.path is not None and file.resolve() == self.path.resolve():
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
            write_text(self.path, _text(self.path, self.rows, header=bool(self.rows), columns=columns))

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """Those that the file has no row of."""
        done = {(row["video"], row["prompt"]) for row in self.rows}
        return [job for job in jobs if (str(job.video), job.prompt) not in done]

    def add(self, more: Iterable[Row]) -> None:
        """Write more rows."""
        rows = list(more)
        for row in rows:
            self._refuse_other_models(row)
        if self.path is not None and rows:
            text = _text(self.path, rows, header=not self.rows, columns=list((self.rows or rows)[0]))
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(text)
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
    """Complete rows; UserError where the file is another's."""
    data = path.read_bytes()  # a kill may have cut the last line within a letter
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
    rows = csv.DictReader(io.StringIO(text, newline=""))
    whole = [row for row in rows if None not in row and None not in row.values()]
    return [{key: _value(key, cell) for key, cell in row.items()} for row in whole]


def _value(key: str, cell: str) -> Any:
    """A cell as it was written: texts stay texts, all else is JSON."""
    if key in ("video", "prompt"):
        return cell
    try:
        return json.loads(cell)
    except ValueError:
        return cell
