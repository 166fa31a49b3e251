"""The work of `sage train` and `sage rollout` between the command line and the engine."""

import hashlib
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import torch
from rich.console import Console

from sagecli import checkpoint, launch, preflight
from sagecli.config_reward import RewardSource
from sagecli.display import TrainDisplay, note, progress, show_warnings, summary_table
from sagecli.engine.rollout import Group
from sagecli.engine.update import trainable
from sagecli.errors import RunStopped, UserError
from sagecli.interrupt import Interrupted, stop_request
from sagecli.loading import dump_config, load_config
from sagecli.prompts import Prompt, read_prompts
from sagecli.rundir import RunDir, fresh_folder, write_text
from sagecli.sampling import Request, Rollouts, prompt_group, rollout_config
from sagecli.scorefile import flat
from sagecli.scoring import Scorer, make_rewards, missing_rewards
from sagecli.training import Training, build_backbone

if TYPE_CHECKING:
    from sagecli.config import Config


SETTINGS = "rollout.toml"


def stamp() -> str:
    """The time, as names of folders have it."""
    return time.strftime("%Y%m%d-%H%M%S")


def check_processes(preset: str, overrides: list[str], resumed: Path | None, count: int) -> None:
    """UserError, before any of them starts, for a configuration that is wrong or has fewer samples than processes."""
    config = _run_of(resumed)[1] if resumed else load_config(preset, overrides)
    launch.check_count(config.parallel, count)
    samples = config.train.groups_per_round * config.train.group_size
    if count > samples * config.parallel.sequence:
        raise UserError(
            f"{count} processes for {samples} samples a round (train.groups_per_round = "
            f"{config.train.groups_per_round}, train.group_size = {config.train.group_size}): each needs one at least"
        )


def start_training(console: Console, preset: str, overrides: list[str], path: Path | None) -> None:
    """A new run; its folder appears when everything that it needs is there."""
    config = load_config(preset, overrides)
    processes = launch.join(config.parallel)
    run = RunDir(processes.gather(path or Path("runs") / f"{Path(preset).stem}-{stamp()}")[0])
    processes.by_first(run.refuse_used)
    processes.together(lambda: preflight.require(missing_for_run(config), f"training with {preset!r}"))
    with TrainDisplay(console, config) as display, enough_memory(config), ExitStack() as held:
        training = Training(config, run, display, processes)
        processes.by_first(lambda: held.enter_context(run.lock()))
        processes.by_first(lambda: run.create(config))
        _train(console, training)


def _run_of(path: Path) -> tuple[RunDir, "Config", Path | None]:
    """The run, its configuration, and the checkpoint that the path names, where it names one."""
    named = path if (path / "manifest.json").is_file() else None
    return (*RunDir.open(path.resolve().parents[1] if named else path), named)


def continue_training(console: Console, path: Path, changed: list[str]) -> None:
    """An interrupted run, from its latest checkpoint, or from the checkpoint that the path names.

    changed: keys of config.toml that may differ from the checkpoint's.
    """
    run, config, named = _run_of(path)
    processes = launch.join(config.parallel)
    processes.together(lambda: preflight.require(missing_for_run(config), f"the run {run.path}"))
    with ExitStack() as held, TrainDisplay(console, config) as display, enough_memory(config):
        processes.by_first(lambda: held.enter_context(run.lock()))
        saved = processes.gather(named or checkpoint.latest(run.path))[0]
        if saved is not None:
            processes.by_first(lambda: checkpoint.check(saved))
            refuse_changes(config, checkpoint.config_of(saved), changed)
        training = Training(config, run, display, processes)
        console.print(note(f"resumed after round {training.resume(saved)}"))
        _train(console, training)


@contextmanager
def enough_memory(config: "Config") -> Iterator[None]:
    """Running out of GPU memory becomes a sentence that names the keys to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        video, model, first = config.video, config.model, str(error).splitlines()[0]
        raise RunStopped(
            f"out of GPU memory ({first}). Lower train.micro_batch (now {config.train.micro_batch}) or video.frames, "
            f"height or width (now {video.frames}, {video.height}, {video.width}); or set "
            f"model.gradient_checkpointing (now {model.gradient_checkpointing}), model.vae_tiling (now "
            f"{model.vae_tiling}) or a reward's offload to true; model.train = 'lora' needs far less than 'full'"
        ) from None


def refuse_changes(config: "Config", saved: "Config", allowed: list[str]) -> None:
    """UserError that lists what a configuration changes against a checkpoint's, unless it is allowed by name."""
    free: Any = {"train": {"prompts"}, "eval": {"prompts"}, "parallel": True}  # any number of processes may go on
    now, before = (flat(one.model_dump(exclude=free)) for one in (config, saved))
    differing = [key for key in sorted({*now, *before}) if now.get(key) != before.get(key)]
    for key in allowed:
        if key not in differing:
            raise UserError(f"--override {key}: it does not differ from the checkpoint's; what differs: {differing}")
    if forbidden := [key for key in differing if key not in allowed]:
        changes = "; ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in forbidden)
        options = " ".join(f"--override {key}" for key in forbidden)
        raise UserError(
            f"the run's config.toml differs from its checkpoint's: {changes}. Where this is meant, add {options}"
        )


def missing_for_run(config: "Config") -> list[str]:
    """What the model and the rewards of a run lack here."""
    return preflight.missing_for_model(config) + missing_rewards(config.reward.models)


def _train(console: Console, training: Training) -> None:
    folder = training.run.path
    count = sum(value.numel() for value in training.learner.parameters.values())
    console.print(
        note(f"training {count:,} parameters ({training.config.model.train}); run folder {folder}"), soft_wrap=True
    )
    for report in training.score.reports:
        console.print(note(report), soft_wrap=True)
    try:
        summary = training.finish()
    except (Interrupted, RunStopped) as error:
        console.print(_stopped(training, isinstance(error, RunStopped)), soft_wrap=True)
        if isinstance(error, RunStopped):
            raise
        raise SystemExit(error.exit_code) from None
    console.print(summary_table(summary))
    show_warnings(console, training.score.warnings)
    for what, path in (
        ("the page", "report.html"),
        ("before and after", "before-after.png"),
        ("weights", "checkpoints/latest"),
    ):
        console.print(f"{what}: {folder / path}", soft_wrap=True)
    console.print(note(f"videos of the trained model: sage rollout --adapter {folder} --prompts FILE"), soft_wrap=True)


def _stopped(training: Training, by_itself: bool) -> str:
    """What is saved, and how to go on."""
    folder = training.run.path
    latest = checkpoint.latest(folder)
    saved = "the start" if latest is None else latest.name
    change = f"\n  (--override KEY for each key that you change in {folder / 'config.toml'})" if by_itself else ""
    return (
        f"stopped after round {training.learner.round}; saved up to {saved}. Go on with:\n"
        f"  sage train --resume {shlex.quote(str(folder))}{change}"
    )


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
    if config.parallel.sequence > 1:
        raise UserError("parallel.sequence: sage rollout shares prompts between processes, not tokens; set it to 1")
    processes = launch.join(config.parallel)
    rewards = [RewardSource(name=name) for name in dict.fromkeys(output.rewards)]
    adapter = checkpoint.find(request.adapter) if request.adapter is not None else None
    out = processes.gather(output.out or Path("rollouts") / stamp())[0]

    def prepare() -> None:
        preflight.require(preflight.missing_for_model(config), f"rollouts of {config.model.path!r}")
        make_rewards(rewards)
        _fill_folder(out, _settings(config, prompts, adapter, output), output)

    processes.by_first(prepare)
    backbone = build_backbone(config.model, [prompt.text for prompt in prompts])
    if adapter is not None:
        checkpoint.load_weights(trainable(backbone.module), adapter)
    score = Scorer.loaded(rewards, config.video.fps, config.reward.timeout) if rewards else None
    for report in score.reports if score else ():
        console.print(note(report), soft_wrap=True)
    rollouts = Rollouts(config, backbone, score, out)
    count = output.videos_per_prompt
    groups = [prompt_group(prompt, place, count, output.seed) for place, prompt in enumerate(prompts)]
    processes.by_first(lambda: rollouts.rewind(count))
    done = set(processes.gather(rollouts.done())[0])
    left = [place for place in range(len(groups)) if place not in done]
    try:
        told = processes.together(lambda: _make_all(console, rollouts, groups, left[processes.rank :: processes.count]))
    except Interrupted as error:
        made = len(rollouts.done())
        console.print(f"stopped; {made} videos are in {out}; add --resume to make the rest", soft_wrap=True)
        return error.exit_code
    processes.by_first(rollouts.sort)
    console.print(
        f"{len(rollouts.done())} videos, manifest.jsonl and a contact sheet a prompt are in {out}", soft_wrap=True
    )
    warnings: dict[str, set[str]] = {}
    for part in processes.gather(score.warnings if score else {}):
        for sentence, texts in part.items():
            warnings.setdefault(sentence, set()).update(texts)
    show_warnings(console, warnings)
    failures = [failure for part in told for failure in part]
    for failure in failures:
        console.print(f"not scored: {failure}", style="red", soft_wrap=True)
    return 1 if failures else 0


def _make_all(console: Console, rollouts: Rollouts, groups: Sequence[Group], places: Sequence[int]) -> list[str]:
    """Make the videos of some prompts, with a bar; returns what could not be scored."""
    failures = []
    with stop_request() as stop, progress(console) as bar:
        task = bar.add_task("videos", total=sum(len(groups[place].seeds) for place in places))
        for place in places:
            failures += rollouts.make(place, groups[place], stop.check)
            bar.advance(task, len(groups[place].seeds))
    return failures


def _settings(config: "Config", prompts: list[Prompt], adapter: Path | None, output: RolloutOutput) -> str:
    """All that makes the videos what they are, as TOML: a folder is completed with the same alone."""
    texts = json.dumps([(prompt.text, prompt.seed) for prompt in prompts])
    rollout = {
        "seed": output.seed,
        "videos_per_prompt": output.videos_per_prompt,
        "rewards": output.rewards,
        "prompts_sha256": hashlib.sha256(texts.encode()).hexdigest(),
        "adapter_sha256": checkpoint.fingerprint(adapter) if adapter is not None else "",
    }
    return dump_config(config) + "\n" + tomli_w.dumps({"rollout": rollout})


def _fill_folder(out: Path, settings: str, output: RolloutOutput) -> None:
    """Make the folder: new, emptied, or one that was made with the same settings."""
    if not output.resume:
        fresh_folder(out, output.force, "rollouts", "--resume to complete it, or --force to replace it", SETTINGS)
    elif not (out / SETTINGS).is_file():
        raise UserError(f"{out} holds no rollouts to resume: it has no {SETTINGS}; leave out --resume")
    elif (out / SETTINGS).read_text(encoding="utf-8") != settings:
        raise UserError(
            f"{out} was made with other settings, prompts or weights (see its {SETTINGS}); resume with the same ones"
        )
    write_text(out / SETTINGS, settings)
