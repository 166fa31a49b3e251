"""What a run needs and this machine lacks, found out before anything is loaded."""

from typing import TYPE_CHECKING

import torch

from sagecli import registry
from sagecli.backends import Backbone
from sagecli.engine.rollout import video_size
from sagecli.errors import UserError

if TYPE_CHECKING:
    from sagecli.config import Config

NEEDS_GPU_BYTES = 2 * 2**30  # a transformer over this takes minutes a step on a CPU

RUNS_HERE = """What runs here now, on the embedded model:
  sage train --preset quickstart
  sage rollout --model tiny --sde precise --prompts PROMPTS.txt"""


def device() -> torch.device:
    """Where models run: of several GPUs this process's own."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def missing_for_model(config: "Config") -> list[str]:
    """What the model lacks: its weights, a GPU. UserError for a video size that it cannot make."""
    backbone: type[Backbone] = registry.load("backends", config.model.backbone)
    lacks = []
    try:
        size = backbone.weight_bytes(config.model.path)
    except UserError as error:
        lacks.append(str(error))
    else:
        backbone.check_size(config.model.path, video_size(config))
    if not torch.cuda.is_available() and (lacks or size > NEEDS_GPU_BYTES):
        lacks.append("no GPU was found: a model of this size needs a CUDA device (80 GB for HunyuanVideo-1.5)")
    return lacks


def require(lacks: list[str], what: str) -> None:
    """Raise UserError with one screen that lists what is missing and what runs here instead."""
    if lacks:
        listed = "\n".join(f"  - {lack}" for lack in lacks)
        raise UserError(f"{what} cannot start here:\n{listed}\n{RUNS_HERE}")
