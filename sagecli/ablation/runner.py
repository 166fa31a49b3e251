"""The runs of a grid: each a process and a normal run folder; finished ones are kept, interrupted ones go on.

A run that fails is shown with its reason, and the others go on. Ctrl-C reaches the processes too, which save.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sagecli.ablation.grid import PlannedCell
from sagecli.interrupt import stop_request
from sagecli.rundir import read_jsonl


@dataclass(frozen=True)
class Job:
    """One run of a cell."""

    cell: PlannedCell
    seed: int
    path: Path
    """Its run folder."""

    @property
    def finished(self) -> bool:
        """Whether it ran to its end."""
        return (self.path / "summary.json").is_file()

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.path.with_name(f"{self.path.name}.log")

    def failure(self) -> str:
        """Why it ended early, in its own words."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.is_file() else []
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or ["it printed nothing"])[-1].removeprefix("error: ")


def run_all(jobs: list[Job], preset: str, at_once: int, tell: Callable[[Job, str], None], processes: int = 1) -> None:
    """Run the jobs that are not finished, `at_once` side by side, each with so many processes; `tell` hears of them.

    Raises Interrupted when a signal came, after the processes have saved.
    """
    waiting = [job for job in jobs if not job.finished]
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    with stop_request() as stop, _ended(running):
        while waiting or running:
            for place in range(at_once):
                if place not in running and waiting:
                    job = waiting.pop(0)
                    running[place] = (job, _start(job, ["--preset", preset], place, at_once, processes))
                    tell(job, "started")
            time.sleep(0.1)
            stop.check()
            for place, (job, process) in list(running.items()):
                if process.poll() is not None:
                    del running[place]
                    tell(job, "finished" if job.finished else "failed")


@contextmanager
def _ended(running: dict[int, tuple[Job, "subprocess.Popen[bytes]"]]) -> Iterator[None]:
    """On the way out every process is told to save and end, and waited for."""
    try:
        yield
    finally:
        for _, process in running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for _, process in running.values():
            process.wait()


def _start(job: Job, preset: list[str], place: int, at_once: int, processes: int) -> "subprocess.Popen[bytes]":
    """A process that begins the run, or continues it where it was interrupted."""
    command = [sys.executable, "-m", "sagecli.cli", "train", "--num-processes", str(processes)]
    if (job.path / "config.toml").is_file():
        command += ["--resume", str(job.path)]
    else:
        shutil.rmtree(job.path, ignore_errors=True)
        settings = [*job.cell.overrides, f"train.seed={job.seed}"]
        command += [*preset, "--run", str(job.path), *(part for one in settings for part in ("--set", one))]
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    if torch.cuda.is_available():
        gpus = (str((place * processes + number) % torch.cuda.device_count()) for number in range(processes))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    else:  # processes that share cores with more threads than there are cores are many times slower
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (at_once * processes)))
    job.path.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:  # its own group: a Ctrl-C is passed on once, as a request to save
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def default_jobs(processes: int) -> int:
    """As many as there are GPUs for; without one, cores, at most four runs."""
    places = torch.cuda.device_count() if torch.cuda.is_available() else min(os.cpu_count() or 1, 4)
    return max(1, places // processes)


def probe_round(cell: PlannedCell, preset: str, folder: Path, processes: int = 1) -> tuple[float, float]:
    """Seconds that one round and one evaluation took, in a run of one round; RuntimeError where it failed."""
    overrides = [*cell.overrides, "train.rounds=1"]
    job = Job(PlannedCell(cell.name, overrides, cell.config), 0, folder / "probe")
    run_all([job], preset, 1, lambda job, state: None, processes)
    if not job.finished:
        raise RuntimeError(job.failure())
    rows, evaluations = (read_jsonl(job.path / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    seconds = [
        sum(value for key, value in row.items() if key.endswith("_seconds")) for row in (rows[0], evaluations[0])
    ]
    return seconds[0], seconds[1]
