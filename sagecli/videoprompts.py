"""The prompt of each video: from its rollout's manifest, else NAME.txt beside it, else a map, else one for all."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sagecli.errors import UserError, did_you_mean
from sagecli.prompts import read_text
from sagecli.videofiles import MANIFEST, place_of


@dataclass(frozen=True)
class Job:
    """A video and what it should show."""

    video: Path
    prompt: str
    """Empty where nothing says it."""


@dataclass(frozen=True)
class Found:
    """Videos with their prompts, and what a map said of others."""

    jobs: list[Job]
    mapped: int
    """Rows of the map."""
    unused: list[str]
    """The videos of its rows that are none of these."""


def find_prompts(videos: Sequence[Path], map_file: Path | None, for_all: str | None) -> Found:
    """The prompt of every video. map_file: .csv or .jsonl with the columns video and prompt.

    UserError for an empty prompt for all, for a map that says two things of a video, and for one that names none.
    """
    if for_all is not None and not for_all.strip():
        raise UserError("--prompt is empty; it takes a text")
    rows = table(map_file, ("video", "prompt")) if map_file is not None else []
    mapped = _places(rows, map_file.parent) if map_file is not None else {}
    manifests: dict[Path, dict[str, str]] = {}

    def prompt(video: Path) -> str:
        manifest = manifests.get(video.parent)
        if manifest is None:
            manifest = manifests[video.parent] = _read_manifest(video.parent / MANIFEST)
        text = manifest.get(video.name) or _beside(video) or mapped.get(place_of(video)) or mapped.get(Path(video.name))
        return text or for_all or ""

    here = {place_of(video) for video in videos} | {Path(video.name) for video in videos}
    unused = [row["video"] for row in rows if not here & _names(row["video"], map_file.parent if map_file else Path())]
    if rows and len(unused) == len(rows):
        raise UserError(f"{map_file}: none of its {len(rows)} rows names a video given here; first {unused[0]}")
    return Found([Job(video, prompt(video)) for video in videos], len(rows), unused)


def require_prompts(jobs: Sequence[Job], rewards: Sequence[str]) -> None:
    """UserError that lists the videos without a prompt."""
    lacking = [str(job.video) for job in jobs if not job.prompt]
    if lacking:
        more = f"\n  and {len(lacking) - 10} more" if len(lacking) > 10 else ""
        raise UserError(
            f"{', '.join(rewards)} needs prompts, and {len(lacking)} of {len(jobs)} videos have none:\n  "
            + "\n  ".join(lacking[:10])
            + more
            + "\nGive them as NAME.txt beside each video, by --prompts FILE (.csv or .jsonl with the columns video and "
            "prompt), or by --prompt TEXT for all"
        )


def _read_manifest(file: Path) -> dict[str, str]:
    """File name -> prompt; a file of that name which no rollout wrote, without these columns, says nothing."""
    rows = [row for row in table(file, (), ("file", "prompt")) if len(row) == 2] if file.is_file() else []
    prompts: dict[str, str] = {}
    for row in rows:
        if prompts.setdefault(row["file"], row["prompt"]) != row["prompt"]:
            raise UserError(f"{file}: {row['file']} has two prompts: {prompts[row['file']]!r} and {row['prompt']!r}")
    return prompts


def _beside(video: Path) -> str:
    """The text of NAME.txt, its lines joined."""
    file = video.with_suffix(".txt")
    return " ".join(read_text(file).split()) if file.is_file() else ""


def _places(rows: Sequence[dict[str, str]], folder: Path) -> dict[Path, str]:
    """Video -> prompt; UserError where two rows name one video but other prompts."""
    mapped: dict[Path, str] = {}
    for row in rows:
        for place in _names(row["video"], folder):
            if mapped.setdefault(place, row["prompt"]) != row["prompt"]:
                raise UserError(f"{row['video']} has two prompts: {mapped[place]!r} and {row['prompt']!r}")
    return mapped


def _names(video: str, folder: Path) -> set[Path]:
    """What a map's row may mean: a place from the map's folder or from here, and any video of a bare name."""
    bare = {Path(video)} if Path(video).name == video else set()
    return {place_of(Path(video)), place_of(folder / video)} | bare


def table(file: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> list[dict[str, str]]:
    """Those columns of a .csv or .jsonl file, every cell a text that is not empty; UserError, with the line, else.

    optional: columns that the first line may lack; then every line may. One that it has in other letters is refused.
    """
    readers = {".csv": _csv, ".jsonl": _jsonl}
    if file.suffix.lower() not in readers:
        raise UserError(f"{file}: not a .csv or .jsonl file")
    rows = readers[file.suffix.lower()](read_text(file), file)
    first = rows[0][1] if rows else {}
    for column in optional:
        if twins := [name for name in first if column not in first and name.strip().lower() == column.lower()]:
            raise UserError(f"{file}: it has the column {twins[0]!r}; write it {column!r}")
    wanted = [*columns, *(column for column in optional if column in first)]
    return [{column: _cell(entry, column, f"{file}, line {line}") for column in wanted} for line, entry in rows]


def _cell(entry: dict[str, object], column: str, where: str) -> str:
    if column not in entry:
        hint = did_you_mean(column, entry)
        if any(";" in name for name in entry):
            hint = "; put commas between the columns, not semicolons"
        raise UserError(f"{where}: no column {column!r}; it has {', '.join(entry)}{hint}")
    cell = entry[column]
    if not isinstance(cell, str) or not cell.strip():
        raise UserError(f"{where}: {column!r} is {json.dumps(cell)}; it takes a text")
    if "\0" in cell:
        raise UserError(f"{where}: {column!r} is {json.dumps(cell)}; it takes a text without the character 0")
    return cell.strip()


def _csv(text: str, file: Path) -> list[tuple[int, dict[str, object]]]:
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    found: list[tuple[int, dict[str, object]]] = []
    try:
        for row in rows:
            if None in row or None in row.values():
                raise UserError(
                    f"{file}, line {rows.line_num}: not {len(rows.fieldnames or ())} cells, as its first line has; "
                    "put a text with commas in double quotes"
                )
            found.append((rows.line_num, dict(row)))
    except csv.Error as error:
        raise UserError(f"{file}, line {rows.line_num}: not CSV ({error})") from None
    return found


def _jsonl(text: str, file: Path) -> list[tuple[int, dict[str, object]]]:
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number}: not JSON ({error})") from None
        if not isinstance(entry, dict):
            raise UserError(
                f'{file}, line {number}: not an object such as {{"video": "a.mp4", "prompt": "a red kite"}}'
            )
        found.append((number, entry))
    return found
