"""What `sage score` was asked for, and which rewards that means."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sagecli import registry
from sagecli.config_reward import RewardConfig, RewardSource
from sagecli.errors import UserError
from sagecli.loading import load_config, parse_override


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


def chosen_rewards(request: ScoreRequest) -> tuple[list[RewardSource], dict[str, float], float]:
    """The rewards, as the preset has them or by name; the weights of their axes; the time limit in seconds."""
    config = load_config(request.preset).reward if request.preset else None
    of_preset = {model.name: model for model in config.models} if config else {}
    names = list(dict.fromkeys(request.rewards or of_preset))
    if not names:
        raise UserError(f"name a reward with --reward; installed: {', '.join(registry.names('rewards'))}")
    tables: dict[str, dict[str, Any]] = {name: {"name": name} for name in names}
    for name in names:
        if name in of_preset:
            tables[name] = of_preset[name].model_dump(exclude={"weights"})
    for text in request.paths:
        name, path = _named_path(text, names)
        tables[name]["path"] = path
    for text in request.options:
        name, key, value = _option(text, names)
        if key in RewardSource.model_fields:
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
    timeout = config.timeout if config else RewardConfig.model_fields["timeout"].default
    return [_source(table) for table in tables.values()], weights, timeout


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
            weights[axis] = float(number)
        except ValueError:
            raise UserError(
                f"--weights {text}: it takes AXIS=NUMBER, with commas between, such as VQ=0.5,TA=1"
            ) from None
    return weights
