"""`sage export`: the weights of a run in formats that other tools load, checked before they are announced."""

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils.logging import set_verbosity_error
from safetensors import SafetensorError

from sagecli import checkpoint, exportformats, registry
from sagecli.backends import Backbone
from sagecli.engine.update import trainable
from sagecli.errors import UserError, did_you_mean
from sagecli.exportcard import place, write_card
from sagecli.hub import is_hub_id
from sagecli.loading import dump_config
from sagecli.rundir import read_jsonl, round_name, write_text

if TYPE_CHECKING:
    from sagecli.config import Config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MARKER = "export.json"


@dataclass(frozen=True)
class ExportRequest:
    """What `sage export` was asked for."""

    source: Path
    format: str | None
    out: Path | None
    dtype: str | None
    step: int | None
    ema: bool
    verify: bool
    force: bool


def export(request: ExportRequest, tell: Callable[[str], None]) -> Path:
    """Write the folder, or nothing; returns it. `tell` is given what happens, a line each."""
    set_verbosity_error()  # diffusers remarks on every change of dtype
    source = checkpoint.find(request.source, request.step)
    config = checkpoint.config_of(source)
    kind = _format(request.format, config)
    dtype_name = _dtype(request.dtype, config, kind)
    if request.ema and not config.optimizer.ema:
        raise UserError("--ema: this run kept no moving average of its weights (optimizer.ema = 0)")
    out = request.out or Path("exports") / f"{_run(source).name}-{kind}"
    _refuse(out, request.force)
    tell(f"{kind}, {dtype_name}, of {source}")
    facts: dict[str, Any] = {"format": kind, "dtype": dtype_name, "ema": request.ema}
    with _replacing(out) as folder:
        facts |= _write_and_check(config, source, request, kind, DTYPES[dtype_name], folder)
        if request.verify:
            tell(_finding(facts))
        _write_rest(config, source, facts | checkpoint.progress(source), folder)
    return out


def _run(source: Path) -> Path:
    """The run that a checkpoint lies in; the checkpoint itself, where it was put elsewhere."""
    return source.parents[1] if source.parent.name == "checkpoints" else source


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """An empty folder that becomes `out`; where that fails, or is ended by a signal, nothing is changed there."""
    target = out.resolve()  # where out is a link, what it leads to
    partial, old = (target.with_name(f".{target.name}.{state}") for state in ("partial", "old"))
    made = [parent for parent in target.parents if not parent.exists()]
    before = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} was not written ({error}); nothing was changed there") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):  # there is none, or a name too long for one
            old.rename(target)  # fails where the new one is there
        shutil.rmtree(old, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # it holds the export
                parent.rmdir()
        signal.signal(signal.SIGTERM, before)


def _format(given: str | None, config: "Config") -> str:
    trains = config.model.train
    if given is None:
        return "merged" if trains == "full" else "diffusers"
    if given not in exportformats.FORMATS:
        known = ", ".join(exportformats.FORMATS)
        raise UserError(f"--format {given!r}: there are {known}{did_you_mean(given, exportformats.FORMATS)}")
    if trains == "full" and given != "merged":
        raise UserError(f"--format {given} holds a LoRA, but this run trained all weights: use --format merged")
    return given


def _dtype(given: str | None, config: "Config", kind: str) -> str:
    """By default an adapter is stored as it was trained, in float32, and a whole model as the run computed."""
    if given is None:
        return "bf16" if kind == "merged" and config.model.dtype == "bfloat16" else "fp32"
    name = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(given, given)
    if name not in DTYPES:
        raise UserError(f"--dtype {given!r}: there are {', '.join(DTYPES)}{did_you_mean(given, DTYPES)}")
    return name


def _refuse(out: Path, force: bool) -> None:
    if out.is_file():
        raise UserError(f"{out} is a file; an export needs a folder")
    if Path.cwd().is_relative_to(out.resolve()):
        raise UserError(f"--out {out}: you are in this folder; name one in it")
    if out.exists() and any(out.iterdir()):
        if not force:
            raise UserError(f"{out} is not empty; name another folder with --out, or --force to replace it")
        if not (out / MARKER).is_file():
            raise UserError(
                f"{out} holds something else than an export (it has no {MARKER}); --force does not replace it"
            )


def _write_and_check(
    config: "Config", source: Path, request: ExportRequest, kind: str, dtype: torch.dtype, folder: Path
) -> dict[str, Any]:
    """Returns the transformer's class and what the check found, None without a check."""
    name = config.model.backbone
    trained = _trained(config, source, request.ema)
    facts: dict[str, Any] = {"transformer": type(trained.module).__name__}
    if not request.verify:
        exportformats.write(trained, name, kind, dtype, folder)
        return facts | dict.fromkeys(("difference", "changed", "lost"))
    if kind in ("tencent", "comfyui"):
        exportformats.write(trained, name, kind, dtype, folder)
        return facts | vars(exportformats.check_named(trained.module, name, kind, dtype, folder))
    exact = exportformats.velocities(trained)
    exportformats.write(trained, name, kind, dtype, folder)
    stored = exportformats.stored_velocities(trained)
    del trained  # two large models need not be in memory at once
    return facts | vars(exportformats.check(_backbone(config, "frozen"), exact, stored, kind, folder))


def _finding(facts: dict[str, Any]) -> str:
    """What the check found, in a sentence."""
    difference, changed, lost = facts["difference"], facts["changed"], facts["lost"]
    if changed is None:
        text = f"checked: read again, what it adds to any layer differs by {difference:.1e} from what was to be stored"
    else:
        text = f"checked: loaded again, its velocities differ by {difference:.1e} from what was to be stored"
        text += f"; training changed them by {changed:.1e}"
        if changed <= exportformats.NOISE:
            return f"{text}, too little to tell it from the base model"
    if facts["dtype"] != "fp32" and lost is not None:
        text += f"; storing it in {facts['dtype']} changed {lost:.1%} of that"
        text += ", which --dtype fp32 keeps" if lost > 0.1 else ""
    return text


def _backbone(config: "Config", train: str) -> Backbone:
    """The run's model on the CPU in float32, whatever it trained on and in."""
    plain = {"train": train, "dtype": "float32", "attention": "native", "gradient_checkpointing": False}
    model = config.model.model_copy(update=plain)
    backbone: Backbone = registry.load("backends", model.backbone)(model, torch.device("cpu"))
    return backbone


def _trained(config: "Config", source: Path, ema: bool) -> Backbone:
    backbone = _backbone(config, config.model.train)
    checkpoint.load_weights(trainable(backbone.module), source, "ema" if ema else None)
    return backbone


def _write_rest(config: "Config", source: Path, facts: dict[str, Any], folder: Path) -> None:
    """The card, the configuration, what was measured, and how the folder was made."""
    measured, prompt = _measured(_run(source), facts["round"])
    write_text(folder / "summary.json", measured)
    write_text(folder / "config.toml", dump_config(config))
    adapter = folder / "adapter_config.json"
    base = place(config.model.path)
    if adapter.is_file() and is_hub_id(base):  # peft itself, told of it, would ask the network
        stated = json.loads(adapter.read_text(encoding="utf-8"))
        write_text(adapter, json.dumps(stated | {"base_model_name_or_path": base}, indent=2) + "\n")
    write_card(folder, config, facts, prompt)
    write_text(folder / MARKER, json.dumps(facts, indent=1) + "\n")


def _measured(run: Path, round: int) -> tuple[str, str]:
    """The summary of a run until the round, as JSON, and a prompt that was evaluated; UserError for damaged files."""
    file = run / "summary.json"
    try:
        summary = file.read_text(encoding="utf-8") if file.is_file() else ""
        if not summary or json.loads(summary)["rounds"] != round:
            file = run / "evaluations.jsonl"
            rows = [row for row in read_jsonl(file) if row["round"] <= round]
            summary = json.dumps({"evaluations": rows}, indent=1) + "\n"
        file = run / "evaluations" / round_name(0) / "scores.jsonl"
        scores = read_jsonl(file)
        return summary, scores[0]["prompt"] if scores else exportformats.CHECK_PROMPT
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{file} is damaged; restore it, or move it away to export without it") from None
