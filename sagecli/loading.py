"""From a preset and its overrides to a Config and back; everything wrong in them is one sentence."""

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli
import tomli_w
from pydantic import ValidationError

from sagecli.config import Config
from sagecli.errors import UserError, did_you_mean
from sagecli.explain import explain
from sagecli.prompts import BUILTIN, read_text


def load_config(preset: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a packaged preset or a .toml file, with "a.b=value" overrides in TOML values.

    Prompt files become absolute: those of a file are relative to it, those of overrides to the working directory.
    UserError, one sentence, for everything that is wrong in them.
    """
    data, source = _preset_data(preset)
    merged, changed = data, []
    for text in overrides:
        key, value = parse_override(text)
        merged = _with_change(merged, key, value)
        changed.append(key)
    merged = _with_absolute_prompts(merged, Path.cwd())
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise UserError(explain(error, merged, source, data, changed)) from None


def dump_config(config: Config) -> str:
    """The configuration as TOML; loaded again it gives an equal Config."""
    return tomli_w.dumps(config.model_dump())


def preset_names() -> list[str]:
    """Names of the packaged presets."""
    entries = files("sagecli.presets").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """The file of a packaged preset, comments and all; UserError for an unknown name."""
    known = preset_names()
    if name not in known:
        hint = did_you_mean(name, known) or "; a file of your own is given as its path, ending in .toml"
        raise UserError(f"unknown preset {name!r}; there are {', '.join(known)}{hint}")
    return (files("sagecli.presets") / f"{name}.toml").read_text(encoding="utf-8")


def _preset_data(preset: str) -> tuple[dict[str, Any], str]:
    """The tables of a preset, prompt files absolute, and what errors call it."""
    if preset.endswith(".toml") or "/" in preset or os.sep in preset:
        data = _parse_toml(read_text(Path(preset)), preset)
        return _with_absolute_prompts(data, Path(preset).absolute().parent), preset
    source = f"preset {preset}"
    return _parse_toml(preset_text(preset), source), source


def _parse_toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise UserError(f"{source}, line {error.lineno}: not TOML ({error.msg})") from None


def _with_absolute_prompts(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of the tables whose relative prompt files start at folder; absolute and builtin ones stay."""
    absolute = dict(data)
    for section in ("train", "eval"):
        table = data.get(section)
        if not isinstance(table, dict):
            continue
        name = table.get("prompts")
        if isinstance(name, str) and name and not name.startswith(BUILTIN):
            absolute[section] = {**table, "prompts": os.path.normpath(folder / name)}
    return absolute


def parse_override(text: str, option: str = "--set") -> tuple[tuple[str, ...], Any]:
    """The key and the value of "a.b=value"; a bare word, which is no TOML value, is a string."""
    key, equals, value = (part.strip() for part in text.partition("="))
    parts = tuple(key.split("."))
    if not equals or not value or not all(parts):
        example = "sampler.eta=0.3 or about='\"text\"'" if option == "--set" else "clip.frames=4"
        raise UserError(f"{option} {text!r}: not of the form key=value, such as {example}")
    try:
        table = tomli.loads(f"value = {value}")
    except tomli.TOMLDecodeError as error:
        if value[0] in "[{\"'":
            raise UserError(f"{option} {key}: {value} is not a TOML value ({error.msg})") from None
        return parts, value
    return parts, (table["value"] if len(table) == 1 else value)


def _with_change(data: dict[str, Any], key: tuple[str, ...], value: Any, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy of the tables with one key set."""
    name, *below = key
    if not below:
        return {**data, name: value}
    path = (*above, name)
    table = data.get(name, {})
    if not isinstance(table, dict):
        whole = ".".join(path)
        raise UserError(f"--set {'.'.join((*above, *key))}: {whole} is no table here; set {whole} as a whole")
    return {**data, name: _with_change(table, tuple(below), value, path)}
