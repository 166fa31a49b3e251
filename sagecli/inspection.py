"""The work of `sage inspect` between the command line, the model and the tables."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from sagecli import inspecting
from sagecli.engine.sampler import build_table
from sagecli.errors import UserError, did_you_mean
from sagecli.loading import load_config

if TYPE_CHECKING:
    from sagecli.config import Config

ETAS = (0.3, 0.5, 1.0)
GRADIENT_SAMPLES = 4
Drawing = Callable[[Path], None]


def inspect_run(
    console: Console, what: str, preset: str, overrides: list[str], as_json: bool, figures: Sequence[Path]
) -> None:
    """Print a table or JSON, and draw it into every figure."""
    known = {"table": _table, "std": _std, "gradients": _gradients, "quality": _quality}
    if what not in known:
        raise UserError(f"unknown inspection {what!r}; there are {', '.join(known)}{did_you_mean(what, known)}")
    rows, shown, draw = known[what](load_config(preset, overrides))
    for path in figures:
        draw(path)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        console.print(shown)


def _title(config: "Config") -> str:
    sampler = config.sampler
    return f"{sampler.sde}, eta {sampler.eta:g}, {sampler.steps} steps, shift {sampler.shift:g}"


def _table(config: "Config") -> tuple[list[dict[str, Any]], RenderableType, Drawing]:
    table = build_table(config.sampler, config.objective.equalizer, 0, config.train.seed)
    title = _title(config)
    return (
        inspecting.rows(table),
        inspecting.terminal_table(table, title),
        lambda path: inspecting.write_figure(table, title, path),
    )


def _std(config: "Config") -> tuple[list[dict[str, Any]], RenderableType, Drawing]:
    from sagecli.measuring import step_stds

    stds = step_stds(config.sampler)
    sampler = config.sampler
    title = f"std of each step, eta {sampler.eta:g}, {sampler.steps} steps, shift {sampler.shift:g}"
    rows = inspecting.std_rows(stds)
    return rows, inspecting.number_table(rows, title, ""), lambda path: inspecting.write_std_figure(stds, title, path)


def _gradients(config: "Config") -> tuple[list[dict[str, Any]], RenderableType, Drawing]:
    from sagecli.measuring import gradient_norms

    prompts, backbone = _model(config, 1)
    rows = gradient_norms(config, backbone, prompts[0], GRADIENT_SAMPLES, _no_tick)
    title = f"norm of log_prob's gradient: {_title(config)}"
    caption = f"means over {GRADIENT_SAMPLES} samples of {prompts[0]!r}; each column over its geometric mean"
    shown = inspecting.number_table(rows, title, caption)
    return rows, shown, lambda path: inspecting.write_gradient_figure(rows, title, path)


def _quality(config: "Config") -> tuple[list[dict[str, Any]], RenderableType, Drawing]:
    from sagecli.measuring import rollout_quality
    from sagecli.scoring import Scorer, check_weights, make_rewards

    check_weights(config.reward, make_rewards(config.reward.models))
    prompts, backbone = _model(config, None)
    score = Scorer.loaded(config.reward.models, config.video.fps, config.reward.timeout)
    rows = rollout_quality(config, backbone, score, prompts, ETAS, _no_tick)
    title = f"reward of rollouts, {config.sampler.steps} steps, guidance {config.sampler.guidance:g}"
    caption = (
        f"{len(prompts)} held-out prompts x {len(config.eval.seeds)} seeds, the same initial noise throughout; "
        "difference to the ODE, with the standard error over prompts"
    )
    shown = inspecting.number_table(rows, title, caption)
    return rows, shown, lambda path: inspecting.write_quality_figure(rows, title, path)


def _model(config: "Config", count: int | None) -> tuple[list[str], Any]:
    """The first held-out prompts and the model, with them encoded."""
    from sagecli import preflight
    from sagecli.commands import missing_for_run
    from sagecli.prompts import read_prompts
    from sagecli.training import build_backbone

    preflight.require(missing_for_run(config), "this inspection")
    prompts = [prompt.text for prompt in read_prompts(config.eval.prompts)][:count]
    return prompts, build_backbone(config.model, prompts)


def _no_tick() -> None:
    """Nothing watches."""
