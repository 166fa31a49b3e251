"""What a run needs and this machine lacks, found out before anything is loaded."""

from typing import TYPE_CHECKING

import torch

from sagecli.backends import weights
from sagecli.engine.rollout import video_size
from sagecli.errors import UserError

if TYPE_CHECKING:
    from sagecli.config import Config

NEEDS_GPU_BYTES = 2 * 2**30  # a transformer over this takes minutes a step on a CPU

RUNS_HERE = """What runs here now, on the embedded model:
  sage train --preset quickstart
  sage rollout --model tiny --sde precise --prompts PROMPTS.txt"""


def device() -> torch.device:
    """Where models run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def missing_for_model(config: "Config") -> list[str]:
    """What the model lacks: its weights, a GPU. UserError for a video size that it cannot make."""
    path = config.model.path
    problem = weights.missing_weights(path)
    if problem is None:
        weights.check_size(path, video_size(config))
    lacks = [] if problem is None else [problem]
    if not torch.cuda.is_available() and (problem or weights.transformer_bytes(path) > NEEDS_GPU_BYTES):
        lacks.append("no GPU was found: a model of this size needs a CUDA device (80 GB for HunyuanVideo-1.5)")
    return lacks


def require(lacks: list[str], what: str) -> None:
    """Raise UserError with one screen that lists what is missing and what runs here instead."""
    if lacks:
        listed = "\n".join(f"  - {lack}" for lack in lacks)
        raise UserError(f"{what} cannot start here:\n{listed}\n{RUNS_HERE}")
