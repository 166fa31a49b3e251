"""`sage score`: rewards of video files."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from statistics import fmean, pstdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sagecli.agreement import OVERALL, Pair, agreement, read_pairs
from sagecli.display import note, progress, show_warnings
from sagecli.errors import RunStopped, UserError, did_you_mean
from sagecli.interrupt import Interrupted, stop_request
from sagecli.scorefile import Row, ScoreFile, flat, job_key, stamp
from sagecli.scorerequest import ScoreRequest, chosen_rewards, settings_of
from sagecli.scoring import Clips, Scorer, make_rewards
from sagecli.videofiles import UnreadableVideoError, VideoInfo, find_videos, place_of, probe, read_frames, shown
from sagecli.videoprompts import Job, find_prompts, require_prompts

PAPER_AXES = ("VQ", "MQ", "TA")
"""Whose plain sum is the paper's "Overall"."""
MAX_BYTES = 2**30
"""Of the frames of one batch in float32: large videos are scored in smaller batches."""


def score_videos(console: Console, request: ScoreRequest) -> int:
    """Score them and show what came out; returns the exit code. All that is wrong in the request is said first."""
    sources, weights, timeout = chosen_rewards(request)
    rewards = make_rewards(sources)
    axes = [axis for reward in rewards.values() for axis in reward.axes]
    for axis in weights:
        if axis not in axes:
            known = ", ".join(axes)
            raise UserError(
                f"--weights: no reward here has the axis {axis!r}; there are {known}{did_you_mean(axis, axes)}"
            )
    pairs = _pairs(request, axes)
    output = ScoreFile(request.out, request.force, request.resume)
    output.refuse_inputs(request.inputs)
    settings = settings_of(sources, weights)
    output.check(axes, flat({"settings": settings}))
    jobs = _jobs(console, request, pairs)
    if replaced := output.drop_replaced(jobs):
        sentence = f"{replaced} of its scores are of videos that have been written anew since; they are scored again"
        console.print(note(f"{request.out}: {sentence}"), soft_wrap=True)
    if needing := [name for name, reward in rewards.items() if reward.needs_prompt]:
        require_prompts(jobs, needing)
    scorer = Scorer.loaded(sources, 0.0, timeout)
    for report in scorer.reports:
        console.print(note(report), soft_wrap=True)
    output.start()
    work = _Work(scorer, output, settings, request.batch)
    stopped = _run(console, work, output.missing(jobs))
    if output.rows:
        console.print(_table(output.rows))
    if pairs and not stopped:
        console.print(_agreement_table(pairs, output.rows))
    show_warnings(console, scorer.warnings)
    _say_how_it_ended(console, work, jobs, stopped)
    return stopped or (1 if work.failures else 0)


def _say_how_it_ended(console: Console, work: "_Work", jobs: Sequence[Job], stopped: int) -> None:
    output = work.output
    for job, reason in work.failures.items():
        console.print(f"not scored: {shown(job.video)}: {reason}", style="red", soft_wrap=True)
    failed = f"; {len(work.failures)} could not be scored" if work.failures else ""
    where = f", in {output.path}" if output.path else ""
    console.print(
        f"{len(jobs) - len(output.missing(jobs))} of {len(jobs)} videos scored{where}{failed}", soft_wrap=True
    )
    if work.gave_up:
        console.print(work.gave_up, style="red", soft_wrap=True)
    if stopped:
        console.print("stopped" + ("; add --resume to score the rest" if output.path else ""))


def _pairs(request: ScoreRequest, axes: Sequence[str]) -> list[Pair]:
    if request.pairs is None:
        return []
    if request.sources or request.prompts or request.prompt:
        raise UserError("--pairs names its own videos and prompts; leave out PATH, --prompts and --prompt")
    return read_pairs(request.pairs, list(dict.fromkeys([*axes, OVERALL])) if _overall_axes(axes) else axes)


def _overall_axes(axes: Sequence[str]) -> Sequence[str]:
    """Whose sum is the "Overall": the paper's three, or the only one; none otherwise."""
    if set(PAPER_AXES) <= set(axes):
        return PAPER_AXES
    return axes if len(axes) == 1 else ()


def _jobs(console: Console, request: ScoreRequest, pairs: Sequence[Pair]) -> list[Job]:
    if pairs:
        return list(dict.fromkeys(job for pair in pairs for job in (pair.first, pair.second)))
    if not request.sources:
        raise UserError("name the videos: files, folders, patterns or a rollout's manifest.jsonl")
    found = find_prompts(find_videos(request.sources), request.prompts, request.prompt)
    if found.unused:
        count, total = len(found.unused), found.mapped
        console.print(
            note(f"{request.prompts}: {count} of {total} rows name no video here, first {found.unused[0]}"),
            soft_wrap=True,
        )
    return found.jobs


def _run(console: Console, work: "_Work", jobs: Sequence[Job]) -> int:
    """Score every job, with a bar; returns the exit code of a signal, or 0."""
    with stop_request() as stop, progress(console) as bar:
        task = bar.add_task("videos", total=len(jobs))
        try:
            work.run(jobs, lambda count: bar.advance(task, count), stop.check)
        except Interrupted as error:
            return error.exit_code
        except RunStopped as error:  # what was scored is kept and shown
            work.gave_up = str(error)
            return 1
    return 0


class _Work:
    """Videos being scored, in batches of files alike."""

    def __init__(self, scorer: Scorer, output: ScoreFile, settings: dict[str, Any], batch: int) -> None:
        self.scorer = scorer
        self.output = output
        self.settings = settings
        self.batch = batch
        self.failures: dict[Job, str] = {}
        self.gave_up = ""
        """Why no more could be scored; empty where all were tried."""

    def run(self, jobs: Sequence[Job], advance: Callable[[int], None], tick: Callable[[], None]) -> None:
        """Score the jobs and write their rows; those that fail are kept in `failures`."""
        for start in range(0, len(jobs), self.batch):
            tick()
            part = [(job, info) for job in jobs[start : start + self.batch] if (info := self._probed(job))]
            for info, alike in groupby(part, key=lambda pair: pair[1]):
                numbers = self._frames(info)
                count = max(1, MAX_BYTES // (12 * len(numbers) * info.height * info.width))
                jobs_alike = [job for job, _ in alike]
                for first in range(0, len(jobs_alike), count):
                    tick()
                    self.output.add(self._rows(jobs_alike[first : first + count], info, numbers))
            advance(len(jobs[start : start + self.batch]))

    def _frames(self, info: VideoInfo) -> list[int]:
        """Numbers of the frames that some reward looks at."""
        wanted = [reward.frames(info.num_frames, info.fps) for reward in self.scorer.rewards.values()]
        return sorted(set().union(*wanted))

    def _probed(self, job: Job) -> VideoInfo | None:
        if shown(job.video) != str(job.video):
            self.failures[job] = "its name is not UTF-8; rename it"
            return None
        try:
            return probe(job.video)
        except UnreadableVideoError as error:
            self.failures[job] = str(error)
            return None

    def _rows(self, jobs: Sequence[Job], info: VideoInfo, numbers: Sequence[int]) -> Iterator[Row]:
        read, stamps = {}, {}
        for job in jobs:
            stamps[job] = stamp(job.video)
            try:
                read[job] = read_frames(job.video, numbers)
            except UnreadableVideoError as error:
                self.failures[job] = str(error)
        if not read:
            return
        jobs, videos = list(read), torch.stack(list(read.values()))
        place = {number: index for index, number in enumerate(numbers)}

        def take(frames: Sequence[int]) -> Tensor:
            return videos[:, [place[frame] for frame in frames]].float().div_(255)

        scored = self.scorer.score(Clips(info.num_frames, info.fps, take), [job.prompt for job in jobs])
        for index, job in enumerate(jobs):
            if index in scored.failures:
                self.failures[job] = scored.failures[index]
                continue
            scores = {axis: float(values[index]) for axis, values in scored.axes.items()}
            row: Row = {"video": str(place_of(job.video)), "prompt": job.prompt} | stamps[job] | vars(info)
            row["scores"] = scores
            row["monitors"] = {name: float(values[index]) for name, values in scored.monitors.items()}
            if set(PAPER_AXES) <= set(scores):
                row["overall"] = sum(scores[axis] for axis in PAPER_AXES)
            if weights := self.settings["weights"]:
                row["reward"] = sum(weight * scores[axis] for axis, weight in weights.items())
                if not math.isfinite(row["reward"]):
                    self.failures[job] = f"its weighted reward is {row['reward']}"
                    continue
            yield flat(row | scored.details[index] | {"settings": self.settings})


def _table(rows: Sequence[Row]) -> Table:
    """Mean and standard deviation over the videos, by axis."""
    table = Table(title=f"{len(rows)} videos", title_justify="left")
    for column in ("", "mean", "standard deviation"):
        table.add_column(column, justify="right" if column else "left")
    for key in rows[0]:
        kind, _, name = key.partition(".")
        if kind in ("scores", "monitors", "overall", "reward") and all(key in row for row in rows):
            values = [row[key] for row in rows]
            style = "dim" if kind == "monitors" else "bold" if not name else ""
            label = name or {"overall": "Overall (VQ + MQ + TA)", "reward": "weighted reward"}[kind]
            table.add_row(label, f"{fmean(values):.4f}", f"{pstdev(values):.4f}", style=style)
    return table


def _agreement_table(pairs: Sequence[Pair], rows: Sequence[Row]) -> Table:
    """Agreement with people over the pairs of which both videos were scored."""
    of_job = {(row["video"], row["prompt"]): row for row in rows}
    scored: list[tuple[Pair, Row, Row]] = []
    for pair in pairs:
        first, second = (of_job.get(job_key(job)) for job in (pair.first, pair.second))
        if first is not None and second is not None:
            scored.append((pair, first, second))
    table = Table(title=f"agreement with people over {len(scored)} of {len(pairs)} pairs", title_justify="left")
    for column in ("", "without ties", "pairs preferred", "with ties", "a tie is |d| up to"):
        table.add_column(column, justify="right" if column else "left")
    for name in pairs[0].preferences if scored else ():
        human = [pair.preferences[name] for pair, _, _ in scored]
        result = agreement(human, [_score(first, name) - _score(second, name) for _, first, second in scored])
        without = "-" if result.without_ties is None else f"{result.without_ties:.4f}"
        table.add_row(name, without, str(result.preferred), f"{result.with_ties:.4f}", f"{result.eps:.4g}")
    return table


def _score(row: Row, dimension: str) -> float:
    axes = [key.removeprefix("scores.") for key in row if key.startswith("scores.")]
    chosen = [dimension] if dimension in axes else _overall_axes(axes)
    return float(sum(row[f"scores.{axis}"] for axis in chosen))
