"""What a run folder holds.

    config.toml          the resolved configuration, with the prompt files it used beside it
    metrics.jsonl        one line an update
    evaluations.jsonl    one line an evaluation; evaluations/round-N/ its videos, scores.jsonl and sheet.png
    rollouts/round-N/    a few videos of the round, and their scores
    checkpoints/         round-N folders, complete or absent; `latest` names the newest
    summary.json, before-after.png
    lock                 held by the process that trains here; names it
    report.html          the run's page, with report_files/; tensorboard/ holds events for TensorBoard

Every file is complete or absent, but for the two .jsonl, which a kill can leave with a broken last line: it is dropped
when the run is resumed.
"""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sagecli.config import Config, EvalConfig, TrainConfig
from sagecli.errors import UserError
from sagecli.loading import dump_config, load_config


def round_name(round: int) -> str:
    """Folder name of a round's checkpoint, rollouts or evaluation; names sort by round."""
    return f"round-{round:06d}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """OSError names the file: a full disk is reported without it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with naming(path), partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object a line, whole or not at all."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Add one line, which a reader sees at once."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a .jsonl file; a missing file has none."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def fresh_folder(path: Path, force: bool, what: str, remedy: str, marker: str) -> Path:
    """Make a folder for new output; one that holds something is refused with the remedy, or emptied with force.

    marker: the file by which a folder of such output is known; force empties no other.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; {what} needs a folder")
    if path.exists() and any(path.iterdir()):
        if not force:
            raise UserError(f"{path} is not empty; choose another folder for {what}, {remedy}")
        if not (path / marker).is_file():
            raise UserError(f"{path} holds something else than {what} (it has no {marker}); --force does not empty it")
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


class RunDir:
    """The folder of one training run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"

    def refuse_used(self) -> None:
        """UserError where the folder holds something already."""
        if self.path.is_file():
            raise UserError(f"{self.path} is a file; a run needs a folder: name another with --run")
        if self.path.exists() and any(self.path.iterdir()):
            hint = "; --resume continues it" if (self.path / "config.toml").exists() else ""
            raise UserError(f"{self.path} is not empty{hint}; name another folder with --run")

    def create(self, config: Config) -> None:
        """Make the folder, with the configuration and the prompt files it names."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "config.toml", dump_config(self._with_own_prompts(config)))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process, however it ends; UserError, naming the other, where one holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(f"{self.path} is being trained already, by {file.read().strip()}") from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    @classmethod
    def open(cls, path: Path) -> tuple["RunDir", Config]:
        """An existing run and its configuration."""
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} is not a run folder: it has no config.toml")
        return cls(path), load_config(str(path / "config.toml"))

    def _with_own_prompts(self, config: Config) -> Config:
        """Copy the prompt files into the run, so that it can be resumed wherever it lies."""
        sections: dict[str, TrainConfig | EvalConfig] = {"train": config.train, "eval": config.eval}
        for name, section in sections.items():
            if section.prompts.startswith("builtin:"):
                continue
            own = f"prompts-{name}{Path(section.prompts).suffix}"
            shutil.copyfile(section.prompts, self.path / own)
            sections[name] = section.model_copy(update={"prompts": own})
        return config.model_copy(update=sections)

    def rewind(self, round: int) -> None:
        """Drop what a resumed run will do again: updates of `round` and later, evaluations after it."""
        write_jsonl(self.metrics, (row for row in read_jsonl(self.metrics) if row["round"] < round))
        write_jsonl(self.evaluations, (row for row in read_jsonl(self.evaluations) if row["round"] <= round))

    def place(self, kind: str, round: int) -> Path:
        """Where a round's rollouts or evaluation lie."""
        return self.path / kind / round_name(round)

    def folder(self, kind: str, round: int) -> Path:
        """The folder of a round's rollouts or evaluation, empty."""
        path = self.place(kind, round)
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        return path
