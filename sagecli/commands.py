"""The work of `sage train` and `sage rollout` between the command line and the engine."""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sagecli import checkpoint, preflight
from sagecli.config_reward import RewardSource
from sagecli.display import TrainDisplay, note, progress, show_warnings, summary_table
from sagecli.engine.update import trainable
from sagecli.errors import RunStopped, UserError
from sagecli.interrupt import Interrupted, stop_request
from sagecli.loading import dump_config, load_config
from sagecli.prompts import read_prompts
from sagecli.rundir import RunDir, fresh_folder, write_text
from sagecli.sampling import Request, Rollouts, prompt_group, rollout_config
from sagecli.scoring import Scorer, make_rewards, missing_rewards
from sagecli.training import Training, build_backbone

if TYPE_CHECKING:
    from sagecli.config import Config


def stamp() -> str:
    """The time, as names of folders have it."""
    return time.strftime("%Y%m%d-%H%M%S")


def start_training(console: Console, preset: str, overrides: list[str], path: Path | None) -> None:
    """A new run; its folder appears when everything that it needs is there."""
    config = load_config(preset, overrides)
    run = RunDir(path or Path("runs") / f"{Path(preset).stem}-{stamp()}")
    run.refuse_used()
    preflight.require(_missing(config), f"training with {preset!r}")
    with TrainDisplay(console, config) as display:
        training = Training(config, run, display)
        run.create(config)
        _train(console, training)


def continue_training(console: Console, path: Path) -> None:
    """An interrupted run, from its latest checkpoint."""
    run, config = RunDir.open(path)
    preflight.require(_missing(config), f"the run {path}")
    with TrainDisplay(console, config) as display:
        training = Training(config, run, display)
        console.print(note(f"resumed after round {training.resume()}"))
        _train(console, training)


def _missing(config: "Config") -> list[str]:
    return preflight.missing_for_model(config) + missing_rewards(config.reward.models)


def _train(console: Console, training: Training) -> None:
    folder = training.run.path
    count = sum(value.numel() for value in training.learner.parameters.values())
    console.print(
        note(f"training {count:,} parameters ({training.config.model.train}); run folder {folder}"), soft_wrap=True
    )
    try:
        summary = training.finish()
    except (Interrupted, RunStopped) as error:
        console.print(
            f"stopped after round {training.learner.round}; everything is saved. Go on with:\n"
            f"  sage train --resume {shlex.quote(str(folder))}",
            soft_wrap=True,
        )
        if isinstance(error, RunStopped):
            raise
        raise SystemExit(error.exit_code) from None
    console.print(summary_table(summary))
    show_warnings(console, training.score.warnings)
    console.print(
        f"before and after: {folder / 'before-after.png'}\nweights: {folder / 'checkpoints' / 'latest'}", soft_wrap=True
    )
    console.print(note(f"videos of the trained model: sage rollout --adapter {folder} --prompts FILE"), soft_wrap=True)


@dataclass(frozen=True)
class RolloutOutput:
    """What `sage rollout` makes and where."""

    prompts: Path
    videos_per_prompt: int
    seed: int
    rewards: list[str]
    out: Path | None
    force: bool
    resume: bool


def make_rollouts(console: Console, request: Request, output: RolloutOutput) -> int:
    """Videos of a prompt file; returns the exit code."""
    prompts = read_prompts(output.prompts)
    config = rollout_config(request)
    preflight.require(preflight.missing_for_model(config), f"rollouts of {config.model.path!r}")
    rewards = [RewardSource(name=name) for name in dict.fromkeys(output.rewards)]
    make_rewards(rewards)
    out = _output_folder(config, output)
    backbone = build_backbone(config.model, [prompt.text for prompt in prompts])
    if request.adapter is not None:
        checkpoint.load_weights(trainable(backbone.module), checkpoint.find(request.adapter))
    score = Scorer.loaded(rewards, config.video.fps, config.reward.timeout) if rewards else None
    rollouts = Rollouts(config, backbone, score, out)
    count = output.videos_per_prompt
    groups = [prompt_group(prompt, place, count, output.seed) for place, prompt in enumerate(prompts)]
    failures = []
    rollouts.rewind(count)
    done = set(rollouts.done())
    with stop_request() as stop, progress(console) as bar:
        task = bar.add_task("videos", total=len(groups) * count)
        for place, group in enumerate(groups):
            if place not in done:
                try:
                    failures += rollouts.make(place, group, stop.check)
                except Interrupted as error:
                    console.print(
                        f"stopped; {len(rollouts.done())} videos are in {out}; add --resume to make the rest",
                        soft_wrap=True,
                    )
                    return error.exit_code
            bar.advance(task, len(group.seeds))
    console.print(
        f"{len(rollouts.done())} videos, manifest.jsonl and a contact sheet a prompt are in {out}", soft_wrap=True
    )
    show_warnings(console, score.warnings if score else {})
    for failure in failures:
        console.print(f"not scored: {failure}", style="red", soft_wrap=True)
    return 1 if failures else 0


def _output_folder(config: "Config", output: RolloutOutput) -> Path:
    """The folder to fill: new, emptied, or one that was made with the same settings."""
    out = output.out or Path("rollouts") / stamp()
    settings = (
        dump_config(config) + f"\n[rollout]\nseed = {output.seed}\nvideos_per_prompt = {output.videos_per_prompt}\n"
    )
    if not output.resume:
        fresh_folder(out, output.force, "rollouts", "--resume to complete it, or --force to replace it")
    elif not (out / "rollout.toml").is_file():
        raise UserError(f"{out} holds no rollouts to resume: it has no rollout.toml; leave out --resume")
    elif (out / "rollout.toml").read_text(encoding="utf-8") != settings:
        raise UserError(f"{out} was made with other settings (see its rollout.toml); resume with the same ones")
    write_text(out / "rollout.toml", settings)
    return out
