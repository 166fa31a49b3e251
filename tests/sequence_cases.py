"""What each process of test_sequence_parallel.py computes: velocities and gradients of a tiny model, its tokens shared.

One process computes the same without sharing.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

from sagecli import launch
from sagecli.backends import VideoSize
from sagecli.backends.hunyuanvideo15 import HunyuanVideo15
from sagecli.backends.sequence_parallel import split_sequence
from sagecli.config import ModelConfig
from sagecli.config_parallel import ParallelConfig
from sagecli.engine.processes import Processes
from sagecli.engine.update import trainable
from sagecli.errors import UserError

PROMPT = 'a sign that says "go"'
SIZES = {"even": VideoSize(16, 24, 5), "odd": VideoSize(12, 20, 5)}  # 72 tokens, and 45, which 2 does not divide


def case(folder: str, processes: Processes, train: str, checkpointing: bool, size: str, batch: int) -> dict[str, Any]:
    """Velocity with guidance, and the gradients of a sum of its squares."""
    lora = {"rank": 2, "alpha": 4.0, "targets": "attention+mlp"}
    settings = {"path": folder, "dtype": "float32", "train": train, "lora": lora}
    model = ModelConfig.model_validate(settings | {"gradient_checkpointing": checkpointing})
    backbone = HunyuanVideo15(model, torch.device("cpu"))
    conditioning = backbone.encode([PROMPT])[PROMPT]
    for name, value in trainable(backbone.module).items():
        if "lora_B" in name:  # zero at the start
            torch.nn.init.normal_(value, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    if processes.sequence > 1:
        split_sequence(backbone.module, processes.sequence, torch.device("cpu"))
    latents = backbone.initial_latents(list(range(batch)), SIZES[size])
    velocity = backbone.velocity(latents, 0.7, conditioning, 2.0)
    velocity.square().mean().backward()
    gradients = {name: value.grad for name, value in trainable(backbone.module).items()}
    if processes.world > 1:
        missing = {name: torch.zeros_like(trainable(backbone.module)[name]) for name in gradients}
        gradients = {name: missing[name] if value is None else value for name, value in gradients.items()}
        processes.add(list(gradients.values()))
    return {"velocity": velocity.detach(), "gradients": gradients}


def refusal(folder: str, count: int) -> str:
    """What is said of so many processes, or of sharing a video of one token between them."""
    settings = {"path": folder, "dtype": "float32", "train": "frozen"}
    backbone = HunyuanVideo15(ModelConfig.model_validate(settings), torch.device("cpu"))
    try:
        split_sequence(backbone.module, count, torch.device("cpu"))
        conditioning = backbone.encode([PROMPT])[PROMPT]
        backbone.velocity(backbone.initial_latents([0], VideoSize(4, 4, 1)), 0.7, conditioning, 1.0)
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, out, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    together = launch.join(ParallelConfig(sequence=count))
    found: dict[str, Any] = {}
    for train, checkpointing, size, batch in product(("lora", "full"), (False, True), SIZES, (1, 2)):
        found[f"{train}-{checkpointing}-{size}-{batch}"] = case(model, together, train, checkpointing, size, batch)
    if count > 1:
        found["refusals"] = [refusal(model, 3), refusal(model, count)]
    torch.save(found, out / f"{count}-{together.turn}.pt")
    if count > 1:
        launch.leave(0, "")
