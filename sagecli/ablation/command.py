"""The work of `sage ablate`: plan, run, and show a table, figures and a page."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sagecli.ablation.figures import write_figures
from sagecli.ablation.grid import Grid, PlannedCell, load_grid, plan
from sagecli.ablation.results import cell_results, write_results
from sagecli.ablation.runner import Job, default_jobs, probe_round, run_all
from sagecli.ablation.table import STYLES, result_table
from sagecli.commands import missing_for_run
from sagecli.display import clock, note, progress
from sagecli.errors import UserError
from sagecli.interrupt import Interrupted
from sagecli.preflight import require
from sagecli.report.collect import Group
from sagecli.report.page import write_page
from sagecli.rundir import write_text

RECORD = "ablation.json"


@dataclass(frozen=True)
class AblateRequest:
    """What `sage ablate` was asked for."""

    name: str
    preset: str
    overrides: list[str]
    seeds: int | None
    out: Path | None
    jobs: int | None
    dry_run: bool
    processes: int = 1
    """Of each run."""


def ablate(console: Console, request: AblateRequest) -> int:
    """Run the grid and show it; returns the exit code."""
    grid = load_grid(request.name)
    cells = plan(grid, request.preset, request.overrides)
    seeds = request.seeds or grid.seeds
    require(missing_for_run(cells[0].config), f"the ablation {request.name!r} on {request.preset!r}")
    at_once = request.jobs or default_jobs(request.processes)
    if request.dry_run:
        _dry_run(console, request, grid, cells, seeds, at_once)
        return 0
    out = request.out or Path("ablations") / f"{Path(request.name).stem}-{Path(request.preset).stem}"
    _record(out, request, cells)
    jobs = [Job(cell, seed, out / f"{_folder(cell.name)}-seed{seed}") for cell in cells for seed in range(seeds)]
    try:
        _run(console, jobs, request, at_once, out)
    except Interrupted as error:
        done = sum(job.finished for job in jobs)
        console.print(f"stopped; {done} of {len(jobs)} runs are finished, the rest is saved; the same command goes on")
        return error.exit_code
    return _show(console, request, grid, jobs, out)


def _record(out: Path, request: AblateRequest, cells: Sequence[PlannedCell]) -> None:
    """Note what the folder's runs are; UserError where it holds those of other settings."""
    record = {"grid": request.name, "preset": request.preset, "cells": {cell.name: cell.overrides for cell in cells}}
    file = out / RECORD
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")) != record:
        raise UserError(
            f"{out} holds an ablation with other settings (see its {RECORD}); name another folder with --out"
        )
    if not file.is_file() and out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} holds something else than an ablation; name another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _folder(name: str) -> str:
    """A cell's name as a folder's."""
    return "-".join("".join(letter if letter.isalnum() or letter in "-." else " " for letter in name).split())


def _dry_run(
    console: Console, request: AblateRequest, grid: Grid, cells: Sequence[PlannedCell], seeds: int, at_once: int
) -> None:
    table = Table(title=f"{request.name}: {grid.about}", title_justify="left")
    for column in ("cell", "seeds", "rounds", "settings"):
        table.add_column(column)
    for cell in cells:
        own = cell.overrides[len(request.overrides) :]
        table.add_row(cell.name, str(seeds), str(cell.config.train.rounds), "\n".join(own))
    console.print(table)
    console.print(note("one round of the first cell, to see how long it takes ..."))
    with tempfile.TemporaryDirectory() as folder:
        try:
            round_seconds, evaluation = probe_round(cells[0], request.preset, Path(folder), request.processes)
        except RuntimeError as error:
            raise UserError(f"the first cell cannot run: {error}") from None
    train = cells[0].config.train
    evaluations = 2 + (train.rounds - 1) // train.eval_every if train.eval_every else 2
    whole = (round_seconds * train.rounds + evaluation * evaluations) * len(cells) * seeds / at_once
    console.print(
        f"a round took {round_seconds:.1f} s and an evaluation {evaluation:.1f} s; {len(cells) * seeds} runs, "
        f"{at_once} side by side: about {clock(whole)}, were each as fast as alone",
        soft_wrap=True,
    )


def _run(console: Console, jobs: list[Job], request: AblateRequest, at_once: int, out: Path) -> None:
    done = sum(job.finished for job in jobs)
    console.print(note(f"{len(jobs)} runs, {done} of them finished, {at_once} at a time, in {out}"), soft_wrap=True)
    with progress(console) as bar:
        task = bar.add_task("runs", total=len(jobs), completed=done)

        def tell(job: Job, state: str) -> None:
            if state == "failed":
                bar.console.print(f"failed: {job.path.name}: {job.failure()}", style="red", soft_wrap=True)
            if state != "started":
                bar.advance(task)

        run_all(jobs, request.preset, at_once, tell, request.processes)


def _show(console: Console, request: AblateRequest, grid: Grid, jobs: Sequence[Job], out: Path) -> int:
    runs: dict[str, dict[int, Path]] = {job.cell.name: {} for job in jobs}
    failures: dict[str, dict[int, str]] = {}
    for job in jobs:
        if job.finished:
            runs[job.cell.name][job.seed] = job.path
        else:
            failures.setdefault(job.cell.name, {})[job.seed] = job.failure()
    results = cell_results(runs, failures, grid.columns)
    embedded = jobs[0].cell.config.model.path == "tiny"
    remark = grid.embedded_note if embedded and grid.embedded_note else grid.note
    facts = {"grid": request.name, "about": grid.about, "note": remark, "preset": request.preset}
    write_results(out / "results.json", results, facts)
    table = result_table(results, grid, remark)
    console.print(_terminal(table))
    figures = write_figures(results, grid, out)
    shown = [result for result in results if result.runs]
    page = write_page([Group(one.name, one.runs) for one in shown], out, f"{request.name}: {grid.about}", [table])
    console.print(
        f"page: {page}\nfigures: {', '.join(map(str, figures))}\nnumbers: {out / 'results.json'}", soft_wrap=True
    )
    return 1 if failures else 0


def _terminal(table: dict[str, Any]) -> Table:
    shown = Table(title=table["title"], title_justify="left", caption=table["note"], caption_justify="left")
    for place, column in enumerate(table["columns"]):
        shown.add_column(column, justify="left" if place == 0 else "right")
    for row in table["rows"]:
        cells = [cell if isinstance(cell, dict) else {"text": cell, "class": ""} for cell in row]
        shown.add_row(*(_cell(place, cell) for place, cell in enumerate(cells)))
    return shown


def _cell(place: int, cell: dict[str, str]) -> Text:
    """The reward with its standard deviation, other numbers short: the page and results.json have them all."""
    text = cell["text"] if place <= 1 else cell.get("short", cell["text"])
    return Text(text, style=STYLES.get(cell["class"].split(" ")[-1], ""))
