"""Checkpoints: everything that changes during a run, in one folder that is complete or absent.

    config.toml           the run's configuration
    weights.safetensors   the trained weights (the adapter, or the whole transformer), by the model's own names
    policies.safetensors  every remembered policy, as POLICY/NAME
    optimizer.pt          the optimizers' states
    state.json            round, update, lambda_kl, updates skipped in a row
    manifest.json         size and sha256 of the others

A run whose parameters are split has sharded/ in place of the three files of tensors (checkpoint_sharded.py).
There is no generator to store: random numbers are named, not drawn in order (engine/noise.py).
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sagecli import checkpoint_sharded
from sagecli.config import Config
from sagecli.engine.update import Learner
from sagecli.errors import UserError
from sagecli.loading import dump_config, load_config
from sagecli.rundir import round_name, write_text

LATEST = "latest"


def save(learner: Learner, checkpoints: Path, keep: int) -> None:
    """Write the checkpoint of a finished round and point `latest` to it; only the newest `keep` stay.

    Every process calls it where the parameters are split, else the first one alone may.
    """
    final = checkpoints / round_name(learner.round)
    partial = checkpoints / f".{final.name}.partial"
    if learner.sharded:
        learner.processes.by_first(lambda: _empty(checkpoints, partial))
        stated = checkpoint_sharded.write(learner, partial)
    else:
        _empty(checkpoints, partial)
        _write_tensors(learner, partial)
        stated = {path.name: statement(path) for path in sorted(partial.iterdir())}

    def finish() -> None:
        _write_state(learner, partial, stated)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _point_latest(checkpoints, final.name)
        for old in sorted(checkpoints.glob("round-*"))[:-keep]:
            shutil.rmtree(old)

    learner.processes.by_first(finish) if learner.sharded else finish()


def _empty(checkpoints: Path, partial: Path) -> None:
    for leftover in checkpoints.glob(".*.partial"):
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)


def _write_tensors(learner: Learner, folder: Path) -> None:
    save_file(
        {name: value.detach().contiguous() for name, value in learner.parameters.items()},
        folder / "weights.safetensors",
    )
    remembered = {
        f"{policy}/{name}": tensor.contiguous()
        for policy, tensors in learner.trust_region.policies.items()
        for name, tensor in zip(learner.parameters, tensors, strict=True)
    }
    save_file(remembered, folder / "policies.safetensors")
    torch.save([optimizer.state_dict() for optimizer in learner.optimizers], folder / "optimizer.pt")


def _write_state(learner: Learner, folder: Path, stated: dict[str, Any]) -> None:
    state = {"round": learner.round, "update": learner.update, "lambda_kl": learner.trust_region.lambda_kl}
    state["not_finite"] = learner.not_finite
    write_text(folder / "state.json", json.dumps(state) + "\n")
    write_text(folder / "config.toml", dump_config(learner.config))
    manifest = stated | {name: statement(folder / name) for name in ("state.json", "config.toml")}
    write_text(folder / "manifest.json", json.dumps(dict(sorted(manifest.items())), indent=1) + "\n")


def statement(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _point_latest(checkpoints: Path, target: str) -> None:
    link = checkpoints / f".{LATEST}"
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    os.replace(link, checkpoints / LATEST)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def latest(run: Path) -> Path | None:
    """The newest checkpoint of a run; None where it has none yet."""
    link = run / "checkpoints" / LATEST
    return link.resolve() if (link / "manifest.json").is_file() else None


def find(path: Path, round: int | None = None) -> Path:
    """The checkpoint that a path names: a checkpoint itself, or the latest of a run, or that of a round."""
    name = LATEST if round is None else round_name(round)
    if (path / "manifest.json").is_file():
        if round is not None and path.resolve().name != name:
            raise UserError(f"{path} is one checkpoint and not that of round {round}; name its run instead")
        return path.resolve()
    for folder in (path / name, path / "checkpoints" / name):
        if (folder / "manifest.json").is_file():
            return folder.resolve()
    there = sorted(one for place in (path, path / "checkpoints") for one in place.glob("round-*[0-9]"))
    if round is not None and there:
        rounds = [int(one.name[6:]) for one in there]
        raise UserError(f"{path} holds no checkpoint of round {round}; there are those of {rounds}")
    if there:  # as when a tool that copies no links copied the run
        raise UserError(f"{path} does not say which of its checkpoints is the latest; name one, such as {there[-1]}")
    raise UserError(f"{path} holds no checkpoint; it takes a run folder, or a folder of its checkpoints/")


def progress(folder: Path) -> dict[str, int]:
    """{"round", "update"} of a checkpoint."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return {"round": state["round"], "update": state["update"]}


def fingerprint(folder: Path) -> str:
    """Changes with any byte of the checkpoint."""
    return _sha256(folder / "manifest.json")


def check(folder: Path) -> None:
    """UserError, offering an earlier one that is whole, where a file is missing, cut short or changed."""
    if problem := _problem(folder):
        earlier = [one for one in sorted(folder.parent.glob("round-*")) if one.name < folder.name and not _problem(one)]
        offer = f"; the one before it is whole: name {earlier[-1]} instead" if earlier else ""
        raise UserError(f"the checkpoint {folder} is {problem}{offer}")


def _problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or "state.json" not in manifest:
        return "incomplete: manifest.json is missing or cut short"
    for name, stated in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"incomplete: {name} is missing"
        if path.stat().st_size != stated["bytes"] or _sha256(path) != stated["sha256"]:
            return f"damaged: {name} is not what was written"
    return None


def restore(learner: Learner, folder: Path) -> None:
    """Continue exactly where the checkpoint, which was checked, stands; every process calls it."""
    if (folder / checkpoint_sharded.FOLDER).is_dir():
        checkpoint_sharded.read(learner, folder)
    elif learner.sharded:
        raise UserError(f"{folder} was written without parallel.shard; resume it with parallel.shard = false")
    else:
        _fill(dict(learner.parameters), folder / "weights.safetensors", "")
        for policy, tensors in learner.trust_region.policies.items():
            _fill(dict(zip(learner.parameters, tensors, strict=True)), folder / "policies.safetensors", f"{policy}/")
        states = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
        for optimizer, state in zip(learner.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    learner.round, learner.update = state["round"], state["update"]
    learner.trust_region.lambda_kl, learner.not_finite = state["lambda_kl"], state["not_finite"]


def rewind(checkpoints: Path, saved: Path) -> None:
    """Make it the run's latest: later ones, which a resumed run writes again, are removed."""
    if saved.resolve().parent == checkpoints.resolve():
        for later in checkpoints.glob("round-*"):
            if later.name > saved.name:
                shutil.rmtree(later)
        _point_latest(checkpoints, saved.name)


def config_of(folder: Path) -> Config:
    """The configuration of the run that wrote the checkpoint."""
    return load_config(str(folder / "config.toml"))


def load_weights(parameters: dict[str, Any], folder: Path, policy: str | None = None) -> None:
    """Copy a checkpoint's weights into the parameters; UserError unless each has its own, of the same shape.

    policy: a remembered one instead, e.g. "ema".
    """
    check(folder)
    if (folder / checkpoint_sharded.FOLDER).is_dir():
        checkpoint_sharded.read_weights(parameters, folder, policy)
        return
    file = "weights.safetensors" if policy is None else "policies.safetensors"
    _fill(parameters, folder / file, "" if policy is None else f"{policy}/")


def _fill(parameters: dict[str, Tensor], path: Path, prefix: str) -> None:
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    stored = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    for name in [*parameters, *stored]:
        given = tuple(stored[name].shape) if name in stored else "nothing"
        wanted = tuple(parameters[name].shape) if name in parameters else "nothing"
        if given != wanted:
            raise UserError(f"{path} does not fit the model: it has {given} for {name}, the model {wanted}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])
