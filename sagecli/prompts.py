"""Prompt files: one prompt a line, or .jsonl or .csv with seeds of their own; builtin:NAME is a packaged one."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sagecli.errors import UserError, did_you_mean

BUILTIN = "builtin:"


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file."""

    text: str
    seed: int | None = None
    """The seed its line states; None where it states none."""


def read_prompts(source: str | Path) -> list[Prompt]:
    """Prompts of a file, or of the packaged file that "builtin:NAME" names, in the file's order.

    UserError, one sentence naming the file, for one that is missing, empty, not text or has a bad line.
    """
    name = str(source)
    if name.startswith(BUILTIN):
        text, suffix = _builtin_text(name.removeprefix(BUILTIN)), ".txt"
    else:
        text, suffix = read_text(Path(source)), Path(source).suffix.lower()
    read = {".jsonl": _jsonl, ".csv": _csv}.get(suffix, _lines)
    prompts = list(read(text, name))
    if not prompts:
        raise UserError(f"{name}: no prompt in this file; it needs at least one")
    return prompts


def builtin_names() -> list[str]:
    """Names of the packaged prompt files."""
    folder = files("sagecli.presets") / "prompts"
    return sorted(entry.name.removesuffix(".txt") for entry in folder.iterdir() if entry.name.endswith(".txt"))


def read_text(path: Path) -> str:
    """A file's text, UTF-8 with or without BOM, its line ends as LF; UserError where it is no such file."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: this is a folder, not a file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if "\0" in text:
        raise UserError(f"{path}: a binary file, not text")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _builtin_text(name: str) -> str:
    known = builtin_names()
    if name not in known:
        raise UserError(
            f"unknown prompt file {BUILTIN}{name}; there are {', '.join(BUILTIN + one for one in known)}"
            + did_you_mean(name, known)
        )
    return (files("sagecli.presets") / "prompts" / f"{name}.txt").read_text(encoding="utf-8")


def _lines(text: str, name: str) -> Iterator[Prompt]:
    for line in text.split("\n"):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield Prompt(stripped)


def _jsonl(text: str, name: str) -> Iterator[Prompt]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error})") from None
        if not isinstance(entry, dict):
            raise UserError(f'{where}: not an object such as {{"prompt": "a red kite", "seed": 7}}')
        if "prompt" not in entry:
            raise UserError(f"{where}: no key 'prompt'; the keys are {list(entry)}{did_you_mean('prompt', entry)}")
        yield _prompt(entry["prompt"], entry.get("seed"), where)


def _csv(text: str, name: str) -> Iterator[Prompt]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [cell.strip() for cell in next(rows, [])]
        if "prompt" not in header:
            raise UserError(f"{name}: no column 'prompt'; the columns of its first line are {header}")
        for row in rows:
            where = f"{name}, line {rows.line_num}"
            if row and len(row) != len(header):
                raise UserError(
                    f"{where}: {len(row)} cells under {len(header)} columns; put a prompt with commas in double quotes"
                )
            if row:
                entry = dict(zip(header, row, strict=True))
                yield _prompt(entry["prompt"], _number(entry.get("seed", "")), where)
    except csv.Error as error:
        raise UserError(f"{name}, line {rows.line_num}: not CSV ({error})") from None


def _number(cell: str) -> int | str | None:
    """A cell as a number where it is one; None where it is empty."""
    stripped = cell.strip()
    return int(stripped) if stripped.isdecimal() and len(stripped) < 20 else stripped or None


def _prompt(text: Any, seed: Any, where: str) -> Prompt:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: 'prompt' is {json.dumps(text)}; it takes a text that is not empty")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        raise UserError(f"{where}: 'seed' is {json.dumps(seed)}; it takes a whole number from 0 to 2^63 - 1")
    return Prompt(text.strip(), seed)
