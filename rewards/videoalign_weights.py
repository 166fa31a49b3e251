"""VideoAlign's files: where they lie, in which layouts, and under which names their weights are saved.

A folder holds model_config.json and checkpoint-N folders, each with model.pth (a whole PEFT state dict) or with
adapter_model.safetensors and non_lora_state_dict.pth (the rest is the base model's). Source: METHOD.md section 7.
"""

import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sagecli.errors import UserError
from sagecli.hub import is_hub_id, local_folder, refuse_pointer

HUB_ID = "KwaiVGI/VideoReward"
BASE_HUB_ID = "Qwen/Qwen2-VL-2B-Instruct"
WHOLE, LORA, REST = "model.pth", "adapter_model.safetensors", "non_lora_state_dict.pth"
HEAD = "rm_head.weight"
UNUSED = "lm_head.weight"  # the language model's own head, which a reward does not need
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Files:
    """What a VideoAlign folder holds and what it is built on."""

    folder: Path
    checkpoint: Path
    """The checkpoint-N folder."""
    base: Path
    """Qwen2-VL's folder: its config and tokenizer, and its weights where the checkpoint holds a LoRA alone."""
    settings: dict[str, Any]
    """model_config.json."""


def find_files(path: str, base: str | None, step: int | None) -> Files:
    """The files that a folder or a hub id in the cache has; UserError, naming every file that is missing."""
    folder = local_folder(path, "the videoalign reward's path")
    settings = read_json(folder / "model_config.json")
    checkpoint = _checkpoint(folder, step)
    if base is None:
        named = str(table_in(settings, "model_config").get("model_name_or_path", BASE_HUB_ID))
        base = named if is_hub_id(named) and not (folder / named).is_dir() else str(folder / os.path.expanduser(named))
    files = Files(folder, checkpoint, local_folder(base, "the videoalign reward's base"), settings)
    if not (files.base / "config.json").is_file():
        raise UserError(f"{files.base}: no config.json, so this is no Qwen2-VL folder; see the reward's option base")
    return files


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of a file; UserError where it is none."""
    refuse_pointer(file)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file.parent}: no {file.name}; is this a folder of VideoAlign weights?") from None
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    return table_in({file.name: found}, file.name)


def table_in(table: dict[str, Any], key: str) -> dict[str, Any]:
    """A table in a table, empty where it is not there; UserError where it is something else."""
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise UserError(f"{key} of the VideoAlign weights is {type(found).__name__}, not an object")
    return found


def _checkpoint(folder: Path, step: int | None) -> Path:
    """The folder of a step, by default the highest; UserError where it is not there or not whole."""
    numbered = ((entry.name.removeprefix("checkpoint-"), entry) for entry in folder.glob("checkpoint-*"))
    steps = {int(number): entry for number, entry in numbered if number.isdecimal() and number.isascii()}
    if step is not None and step not in steps:
        raise UserError(f"{folder}: no checkpoint-{step}; there are steps {sorted(steps)}")
    if not steps:
        raise UserError(f"{folder}: no checkpoint-N folder; is this a folder of VideoAlign weights?")
    chosen = steps[max(steps) if step is None else step]
    if not (chosen / WHOLE).is_file() and not ((chosen / LORA).is_file() and (chosen / REST).is_file()):
        raise UserError(f"{chosen} is incomplete: it needs {WHOLE}, or {LORA} and {REST}")
    return chosen


def load_weights(files: Files, vocabulary: int) -> tuple[Weights, str]:
    """Weights named as Qwen2VLModel's and HEAD, LoRA merged in, and one line on how many keys were used.

    vocabulary: rows of the token embedding; the base model's has more, which training cut off.
    """
    if (files.checkpoint / WHOLE).is_file():
        given, sources = _renamed(_read_pickle(files.checkpoint / WHOLE)), WHOLE
        weights: Weights = {}
    else:
        given = _renamed(_read_safetensors(files.checkpoint / LORA) | _read_pickle(files.checkpoint / REST))
        sources = f"{LORA} and {REST}"
        weights = _base_weights(files.base)
    count = len(given)
    loras, rest = _split(given)
    weights |= rest
    weights.pop(UNUSED, None)
    _merge(weights, loras, table_in(files.settings, "peft_lora_config"), files.checkpoint)
    table = weights.get("language_model.embed_tokens.weight")
    if table is not None:
        weights["language_model.embed_tokens.weight"] = table[:vocabulary]
    report = f"videoalign: {count} of {count} keys of {files.checkpoint.name}/{sources} loaded, {len(loras)} LoRA pairs"
    return weights, report


def fill(model: nn.Module, weights: Weights, where: Path) -> None:
    """Put the weights into the model; UserError, naming the first, for one that is too many, missing or misshapen."""
    expected = {name: value.shape for name, value in model.state_dict().items()}
    problems = {
        "not known to it": sorted(set(weights) - set(expected)),
        "missing": sorted(set(expected) - set(weights)),
        "of another shape": sorted(n for n in set(expected) & set(weights) if expected[n] != weights[n].shape),
    }
    for problem, names in problems.items():
        if names:
            raise UserError(
                f"{where} does not fit this Qwen2-VL reward model: {len(names)} weights are {problem}, "
                f"first {', '.join(names[:3])}"
            )
    model.load_state_dict(weights, assign=True)


def _renamed(weights: Weights) -> Weights:
    """Keys as transformers 5 names them, without PEFT's wrapping; both the older and the newer layout are read."""
    names: dict[str, str] = {}
    for key in weights:
        name = key.removeprefix("base_model.model.").removeprefix("model.")
        if name.startswith(("embed_tokens.", "layers.", "norm.")):
            name = f"language_model.{name}"
        name = name.replace(".default.", ".").replace(".base_layer.", ".")
        if name in names:
            raise UserError(f"two keys mean the weight {name}: {names[name]} and {key}")
        names[name] = key
    return {name: weights[key] for name, key in names.items()}


def _split(weights: Weights) -> tuple[dict[str, dict[str, Tensor]], Weights]:
    """LoRA matrices by the weight they change, "A" and "B" each, and all other weights."""
    loras: dict[str, dict[str, Tensor]] = {}
    rest = {}
    for name, value in weights.items():
        match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", name)
        if match is None:
            rest[name] = value
        else:
            loras.setdefault(f"{match[1]}.weight", {})[match[2]] = value
    return loras, rest


def _merge(weights: Weights, loras: dict[str, dict[str, Tensor]], peft: dict[str, Any], where: Path) -> None:
    """Add (alpha / r) B A to the weights, in float32."""
    if loras and not isinstance(peft.get("lora_alpha"), int | float):
        raise UserError("model_config.json: peft_lora_config.lora_alpha is missing, and the LoRA's size hangs on it")
    for name, pair in loras.items():
        if set(pair) != {"A", "B"} or name not in weights:
            lacks = "the weight itself" if name not in weights else f"its lora_{'B' if 'A' in pair else 'A'}"
            raise UserError(f"{where} has a LoRA of {name} but lacks {lacks}")
        rank = len(pair["A"])
        scale = peft["lora_alpha"] / (rank**0.5 if peft.get("use_rslora") else rank)
        weights[name] = weights[name].float() + scale * (pair["B"].float() @ pair["A"].float())


def _base_weights(base: Path) -> Weights:
    """Every weight of the base model's safetensors files."""
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{base}: no *.safetensors; a checkpoint that holds a LoRA alone needs the base model's weights"
        )
    weights: Weights = {}
    for file in files:
        weights |= _read_safetensors(file)
    return _renamed(weights)


def _read_safetensors(file: Path) -> Weights:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    refuse_pointer(file)
    try:
        return load_file(file)
    except SafetensorError as error:
        raise UserError(f"{file} is not a whole safetensors file ({error}); get it again") from None


def _read_pickle(file: Path) -> Weights:
    refuse_pointer(file)
    if not zipfile.is_zipfile(file):
        raise UserError(f"{file} is not a whole file of weights (cut short, or no torch file); get it again")
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it ends too early"
        raise UserError(f"{file} is not a whole file of weights ({reason}); get it again") from None
    if not isinstance(loaded, dict) or not _all_tensors(loaded.values()):
        raise UserError(f"{file} holds no state dict of tensors")
    return dict(loaded)


def _all_tensors(values: Iterable[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in values)
