"""What `sage score` was asked for, and which rewards that means."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sagecli import registry
from sagecli.config_reward import RewardConfig, RewardSource
from sagecli.errors import UserError
from sagecli.loading import load_config, parse_override
from sagecli.videofiles import shown


@dataclass(frozen=True)
class ScoreRequest:
    """What `sage score` was asked for."""

    sources: list[str]
    rewards: list[str]
    preset: str | None
    paths: list[str]
    """NAME=DIR, or DIR where there is one reward."""
    options: list[str]
    """NAME.KEY=VALUE."""
    prompts: Path | None
    prompt: str | None
    weights: str | None
    """AXIS=NUMBER, with commas between."""
    pairs: Path | None
    out: Path | None
    force: bool
    resume: bool
    batch: int
    timeout: float | None
    """Seconds a reward may take for one batch; None: the preset's, or the schema's."""

    @property
    def inputs(self) -> list[Path]:
        """Files that are read, as far as they are named."""
        return [*map(Path, self.sources), *(file for file in (self.prompts, self.pairs) if file)]


def chosen_rewards(request: ScoreRequest) -> tuple[list[RewardSource], dict[str, float], float]:
    """The rewards, as the preset has them or by name; the weights of their axes; the time limit in seconds."""
    _refuse_unusable(request)
    config = load_config(request.preset).reward if request.preset else None
    of_preset = {model.name: model for model in config.models} if config else {}
    names = list(dict.fromkeys(request.rewards or of_preset))
    if not names:
        raise UserError(f"name a reward with --reward; installed: {', '.join(registry.names('rewards'))}")
    tables: dict[str, dict[str, Any]] = {name: {"name": name} for name in names}
    for name in names:
        if name in of_preset:
            tables[name] = of_preset[name].model_dump(exclude={"weights"})
    given: list[tuple[str, str, Any]] = [
        (name, "path", path) for name, path in (_named_path(text, names) for text in request.paths)
    ]
    given += [_option(text, names) for text in request.options]
    places = [(name, key) for name, key, _ in given]
    for name, key, value in given:
        if places.count((name, key)) > 1:
            raise UserError(f"{name}.{key} is given twice; give it once")
        if key in ("path", "dtype", "offload"):
            tables[name][key] = value
        else:
            tables[name].setdefault("options", {})[key] = value
    weights = _weights(request.weights) if request.weights else {}
    if config and not request.weights:
        if config.combine == "taros":
            raise UserError(f"{request.preset} weighs groups of videos (taros), not single ones; give --weights too")
        weights = {
            axis: weight for name in names if name in of_preset for axis, weight in of_preset[name].weights.items()
        }
    timeout = request.timeout or (config.timeout if config else RewardConfig.model_fields["timeout"].default)
    return [_source(table) for table in tables.values()], weights, timeout


def _refuse_unusable(request: ScoreRequest) -> None:
    """UserError for an option that is there but says nothing, as a script's unset variable leaves it, or no text."""
    for name, text in (("preset", request.preset), ("weights", request.weights)):
        if text == "":
            raise UserError(f"--{name} is empty; leave it out or give it a value")
    for text in (request.prompt or "", *request.paths, *request.options):
        if shown(Path(text)) != str(Path(text)):
            raise UserError(f"{shown(Path(text))}: not UTF-8 text")


def _source(table: dict[str, Any]) -> RewardSource:
    try:
        return RewardSource.model_validate(table)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        reason = problem["msg"][0].lower() + problem["msg"][1:]
        raise UserError(f"--option {table['name']}.{key} = {problem['input']!r}: {reason}") from None


def _named_path(text: str, names: Sequence[str]) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not text or (equals and not path):
        raise UserError(f"--path {text!r} names no folder; leave it out or name one")
    if equals and name in names:
        return name, path
    if len(names) == 1 and not (equals and name in registry.names("rewards")):
        return names[0], text
    raise UserError(f"--path {text}: with these rewards it takes NAME=DIR, and NAME is one of {', '.join(names)}")


def _option(text: str, names: Sequence[str]) -> tuple[str, str, Any]:
    key, value = parse_override(text, "--option")
    if len(key) != 2 or key[0] not in names:
        raise UserError(f"--option {text}: it takes NAME.KEY=VALUE, and NAME is one of {', '.join(names)}")
    return key[0], key[1], value


def _weights(text: str) -> dict[str, float]:
    weights = {}
    for part in text.split(","):
        axis, _, number = (piece.strip() for piece in part.partition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not axis or not math.isfinite(weight):
            raise UserError(f"--weights {text}: it takes AXIS=NUMBER, with commas between, such as VQ=0.5,TA=1")
        if axis in weights:
            raise UserError(f"--weights {text}: {axis} stands there twice")
        weights[axis] = weight
    return weights


def settings_of(sources: Sequence[RewardSource], weights: dict[str, float]) -> dict[str, Any]:
    """What scores depend on, for the score file's rows: each reward's options, the weights; folders absolute."""
    rewards = {}
    for source in sources:
        plugin = registry.load("rewards", source.name)
        named = {"path": source.path, "dtype": source.dtype} | source.options
        given = {key: value for key, value in named.items() if key in registry.option_names(plugin) and value != ""}
        rewards[source.name] = {key: _absolute(value) for key, value in (registry.defaults(plugin) | given).items()}
    return {"rewards": rewards, "weights": weights}


def _absolute(value: Any) -> Any:
    """A text that names something that is here, as its absolute path; anything else as it is."""
    is_place = isinstance(value, str) and value and os.path.exists(os.path.expanduser(value))
    return os.path.realpath(os.path.expanduser(value)) if is_place else value
