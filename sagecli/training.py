"""One training run: builds what the engine needs, keeps the run's files, stops and resumes it."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError

from sagecli import checkpoint, media, preflight, registry, selfcheck
from sagecli.backends import Backbone
from sagecli.engine.processes import ALONE, Processes
from sagecli.engine.rollout import Tick, round_sampling
from sagecli.engine.sharding import shard
from sagecli.engine.train import Round, evaluate, train_round
from sagecli.engine.update import Learner
from sagecli.errors import RunStopped, UserError
from sagecli.interrupt import Interrupted, stop_request
from sagecli.prompts import read_prompts
from sagecli.report import report_runs
from sagecli.rundir import RunDir, append_jsonl, read_jsonl, round_name, write_jsonl, write_text
from sagecli.scoring import Scorer, check_weights, make_rewards
from sagecli.summary import Rows, means, sample_rows, summarize
from sagecli.trackers import Trackers

if TYPE_CHECKING:
    from sagecli.config import Config, ModelConfig


class Watcher(Protocol):
    """Shows a run to whoever watches it."""

    def resumed(self, round: int, first: dict[str, Any]) -> None:
        """The run goes on after `round`; `first` is its evaluation before training."""

    def tick(self) -> None:
        """The model is about to be called."""

    def evaluated(self, evaluation: dict[str, Any]) -> None:
        """An evaluation was written."""

    def round_done(self, round: Round) -> None:
        """A round was written."""

    def checked(self, lines: list[str]) -> None:
        """The first round's self-checks, a line each."""


def build_backbone(model: "ModelConfig", prompts: list[str]) -> Backbone:
    """The model on its device, with the prompts encoded and the text encoders gone."""
    backbone: Backbone = registry.load("backends", model.backbone)(model, preflight.device())
    backbone.encode(prompts)
    backbone.free_text_encoders()
    return backbone


def _texts(source: str) -> list[str]:
    """The prompts of a file; UserError where they bring seeds, which a run would ignore."""
    prompts = read_prompts(source)
    if any(prompt.seed is not None for prompt in prompts):
        raise UserError(f"{source}: its prompts have seeds of their own; a run takes train.seed and eval.seeds instead")
    return [prompt.text for prompt in prompts]


class Training:
    """A run in progress: the learner and everything around it."""

    def __init__(self, config: "Config", run: RunDir, watcher: Watcher, processes: Processes = ALONE) -> None:
        self.config = config
        self.run = run
        self.watcher = watcher
        self.processes = processes
        self.prompts, self.heldout = _texts(config.train.prompts), _texts(config.eval.prompts)
        check_weights(config.reward, make_rewards(config.reward.models))
        if config.model.train == "frozen":
            raise UserError("model.train = 'frozen' trains nothing; it takes 'lora' or 'full' here")
        if not any(round_sampling(config, round).table.trained_steps for round in range(config.train.rounds)):
            raise UserError(
                f"sampler.sde = {config.sampler.sde!r} with these sde_steps and last_step leaves no SDE step to train"
            )
        self.backbone = build_backbone(config.model, self.prompts + self.heldout)
        self.score = Scorer.loaded(config.reward.models, config.video.fps, config.reward.timeout)
        if processes.sequence > 1:
            from sagecli.backends.sequence_parallel import split_sequence

            split_sequence(self.backbone.module, processes.sequence, preflight.device())
        if config.parallel.shard and processes.world > 1:
            computed = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
            shard(self.backbone.module, computed, preflight.device())
        self.learner = Learner(config, self.backbone, processes)
        self.trackers = Trackers(config, run.path) if processes.first else None

    def resume(self, saved: Path | None) -> int:
        """Go back to a checkpoint, or to the start without one; returns the rounds that it has behind it."""
        if saved is not None:
            checkpoint.restore(self.learner, saved)
        self.processes.by_first(lambda: self._rewind(saved))
        for first in read_jsonl(self.run.evaluations)[:1]:
            self.watcher.resumed(self.learner.round, first)
        return self.learner.round

    def _rewind(self, saved: Path | None) -> None:
        if saved is not None:
            checkpoint.rewind(self.run.checkpoints, saved)
        self.run.rewind(self.learner.round)

    def finish(self) -> dict[str, Any]:
        """Train to the end and write the summary; a signal saves and raises Interrupted."""
        with stop_request() as stop:

            def tick() -> None:
                stop.check()
                self.watcher.tick()

            try:
                self._loop(tick)
            except (Interrupted, RunStopped):
                self._save()
                raise
            except torch.OutOfMemoryError:
                if not self.learner.sharded:  # others may be in the middle of an update
                    self._save()
                raise
            finally:
                if self.trackers:
                    self.trackers.finish()
        self.processes.by_first(self._write_ending)
        return dict(json.loads((self.run.path / "summary.json").read_text(encoding="utf-8")))

    def _write_ending(self) -> None:
        self._summarize()
        report_runs([self.run.path], None)

    def _loop(self, tick: Tick) -> None:
        while True:
            self._evaluate_if_due(tick)
            if self.learner.round == self.config.train.rounds:
                break
            done = train_round(self.learner, self.backbone, self.score, self.prompts, tick)
            self._keep_rollouts(done)
            if done.number == 0:
                done.updates[0]["checks"], found = selfcheck.first_round(self.config, self.learner, self.score, done)
                self.watcher.checked(found)
            if self.processes.first:
                self._log(done)
            if self.learner.round % self.config.train.save_every == 0:
                self._save()
            self.watcher.round_done(done)
        self._save()

    def _log(self, done: Round) -> None:
        for metrics in done.updates:
            append_jsonl(self.run.metrics, metrics)
            if self.trackers:
                self.trackers.log("train", metrics)
        every = self.config.train.report_every
        if every and any(metrics["update"] % every == 0 for metrics in done.updates):
            report_runs([self.run.path], None)

    def _save(self) -> None:
        """Write a checkpoint of the last finished round, unless it has one or a part of the next was applied."""
        if not (self.processes.first or self.learner.sharded):
            return
        latest = self.run.checkpoints / checkpoint.LATEST
        saved = latest.exists() and latest.resolve().name == round_name(self.learner.round)
        if self.learner.between_rounds and not saved:
            try:
                checkpoint.save(self.learner, self.run.checkpoints, self.config.train.keep)
            except (OSError, SafetensorError, RuntimeError) as error:  # torch's own writer raises RuntimeError
                name = round_name(self.learner.round)
                raise RunStopped(
                    f"the checkpoint {name} could not be written ({error}); is the disk full? Earlier ones are whole"
                ) from None

    def _evaluate_if_due(self, tick: Tick) -> None:
        round, rounds, every = self.learner.round, self.config.train.rounds, self.config.train.eval_every
        due = round in (0, rounds) or (every > 0 and round % every == 0)
        missing = all(row["round"] != round for row in read_jsonl(self.run.evaluations))
        if due and self.processes.gather(missing)[0]:
            self._evaluate(tick)

    def _evaluate(self, tick: Tick) -> None:
        """Each process evaluates some of the prompts; the first one writes what they found."""
        started = time.perf_counter()
        round, count = self.learner.round, self.config.eval.videos
        folder = self.run.place("evaluations", round)
        self.processes.by_first(lambda: self.run.folder("evaluations", round))
        shown = set(np.linspace(0, len(self.heldout) - 1, min(count, len(self.heldout))).round().astype(int).tolist())
        mine: Sequence[int] = range(self.processes.rank, len(self.heldout), self.processes.count)
        if self.learner.in_step:  # all processes call the model equally often; what is done twice counts once
            most = -(-len(self.heldout) // self.processes.count)
            mine = [(self.processes.rank + turn * self.processes.count) % len(self.heldout) for turn in range(most)]

        def work() -> dict[int, tuple[Rows, Any]]:
            found = {}
            prompts = {place: self.heldout[place] for place in mine}
            for place, sample, scored in evaluate(self.learner, self.backbone, self.score, prompts, tick):
                rows, picture = sample_rows(scored, self.config.eval.seeds), None
                if place in shown:
                    if place % self.processes.count == self.processes.rank and self.processes.leads:
                        media.write_video(folder / f"{place:03d}.mp4", sample.videos[0], self.config.video.fps)
                    picture = media.sheet_row(sample.videos[0], rows[0])
                found[place] = rows, picture
            return found

        with self.learner.evaluated_policy():
            told = self.processes.together(work)
        found = dict(sorted(entry for part in told for entry in part.items()))
        rows = [row for of_prompt, _ in found.values() for row in of_prompt]
        failed = sum(row["reward"] is None for row in rows)
        evaluation = {"round": round, "update": self.learner.update, "failed": failed} | means(rows)
        evaluation["evaluate_seconds"] = time.perf_counter() - started
        if self.processes.first:
            sheet = [picture for _, picture in found.values() if picture is not None]
            media.write_sheet(folder / "sheet.png", f"held out, after {round} rounds", sheet)
            write_jsonl(folder / "scores.jsonl", rows)
            append_jsonl(self.run.evaluations, evaluation)
        if self.trackers:
            self.trackers.log("heldout", evaluation)
        self.watcher.evaluated(evaluation)

    def _keep_rollouts(self, done: Round) -> None:
        """Write the first videos of the first groups, each where it was made, with their scores."""
        count = self.config.train.videos_per_round
        if not count:
            return
        folder = self.run.place("rollouts", done.number)
        self.processes.by_first(lambda: self.run.folder("rollouts", done.number))
        for place, sampled in done.own.items():
            if place < count and done.share[place][0] == 0 and self.processes.leads:
                media.write_video(folder / f"{place:03d}.mp4", sampled.videos[0], self.config.video.fps)
        if self.processes.first:
            rows = [sample_rows(scored, scored.group.seeds)[0] for scored in done.groups[:count]]
            write_jsonl(folder / "scores.jsonl", [{"file": f"{place:03d}.mp4"} | row for place, row in enumerate(rows)])

    def _summarize(self) -> None:
        folders = [self.run.path / "evaluations" / round_name(round) for round in (0, self.learner.round)]
        before, after = (read_jsonl(folder / "scores.jsonl") for folder in folders)
        times = read_jsonl(self.run.metrics) + read_jsonl(self.run.evaluations)
        seconds = sum(value for row in times for key, value in row.items() if key.endswith("_seconds"))
        summary = summarize(before, after) | {
            "rounds": self.learner.round,
            "seconds": round(seconds, 1),
            "seed": self.config.train.seed,
        }
        media.side_by_side(self.run.path / "before-after.png", *(folder / "sheet.png" for folder in folders))
        write_text(self.run.path / "summary.json", json.dumps(summary, indent=1) + "\n")
