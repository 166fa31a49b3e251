"""Tensors of a checkpoint whose parameters are split, by torch.distributed.checkpoint: each process writes its parts.

    weights/NAME, policies/POLICY/NAME, optimizer/STATE/NAME

Any number of processes reads them, one among them: what each needs is found in the files of all.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from sagecli.engine.sharding import like
from sagecli.engine.update import Learner
from sagecli.errors import UserError

FOLDER = "sharded"
STATES = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), torch.optim.Muon: ("momentum_buffer",)}
"""What an optimizer keeps of each parameter, in its shape; AdamW counts its steps too."""


def write(learner: Learner, folder: Path) -> dict[str, Any]:
    """Write them; returns the statements of every file for the manifest. RuntimeError, in all, where one could not."""
    from sagecli.checkpoint import statement

    processes = learner.processes
    try:
        save(_tensors(learner), checkpoint_id=folder / FOLDER)
    except CheckpointException as error:  # torch's own derives from BaseException, and its text is every traceback
        reasons = {f"process {rank}: {failure[0]}" for rank, failure in error.failures.items()}
        raise RuntimeError("; ".join(sorted(reasons))) from None
    mine = list((folder / FOLDER).glob(f"__{dist.get_rank()}_*"))
    mine += [folder / FOLDER / ".metadata"] if processes.first else []
    told = processes.gather_all({f"{FOLDER}/{file.name}": statement(file) for file in mine})
    return {name: stated for part in told for name, stated in part.items()}


def read(learner: Learner, folder: Path) -> None:
    """Fill the learner's weights, remembered policies and optimizer."""
    _load(_tensors(learner), folder)


def read_weights(parameters: dict[str, Tensor], folder: Path, policy: str | None) -> None:
    """Fill parameters with the weights, or with a remembered policy."""
    above = "weights" if policy is None else f"policies/{policy}"
    _load({f"{above}/{name}": value.detach() for name, value in parameters.items()}, folder)


def _tensors(learner: Learner) -> dict[str, Tensor]:
    """All of a learner's tensors by name; an optimizer that has made no step gets its state here."""
    found = {f"weights/{name}": value.detach() for name, value in learner.parameters.items()}
    for policy, tensors in learner.trust_region.policies.items():
        for (name, value), part in zip(learner.parameters.items(), tensors, strict=True):
            found[f"policies/{policy}/{name}"] = like(value.detach(), part)
    names = {value: name for name, value in learner.parameters.items()}
    for optimizer in learner.optimizers:
        keys = next(keys for kind, keys in STATES.items() if isinstance(optimizer, kind))
        for value in optimizer.param_groups[0]["params"]:
            if not optimizer.state[value]:
                optimizer.state[value] |= {key: torch.zeros_like(value.detach()) for key in keys}
                if len(keys) == 2:
                    optimizer.state[value]["step"] = torch.zeros(())
            found |= {f"optimizer/{key}/{names[value]}": kept for key, kept in optimizer.state[value].items()}
    return found


def _load(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill the tensors; UserError for one that the files lack or have in another shape."""
    stored = FileSystemReader(folder / FOLDER).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        entry = stored.get(name)
        given = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else "nothing"
        if given != tuple(tensor.shape):
            raise UserError(
                f"{folder} does not fit the model: it has {given} for {name}, the model {tuple(tensor.shape)}"
            )
    load(tensors, checkpoint_id=folder / FOLDER)
