"""Which parameters of a transformer train: a LoRA adapter, or everything that the loss reaches."""

import re
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from torch import nn

from sagecli.errors import UserError

if TYPE_CHECKING:
    from sagecli.config import ModelConfig


def choose_trained(transformer: Any, model: "ModelConfig", targets: dict[str, str], dead: str | None) -> None:
    """Let the adapter ("lora"), all weights ("full") or nothing ("frozen") train, but nothing whose name matches dead.

    targets: name of a set of layers -> regular expression of whole module names. Raises UserError where none fits.
    """
    if model.train == "full":
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_(dead is None or re.fullmatch(dead, name) is None)
    elif model.train == "frozen":
        transformer.requires_grad_(False)
    else:
        pattern = targets.get(model.lora.targets, model.lora.targets)
        config = LoraConfig(
            r=model.lora.rank,
            lora_alpha=model.lora.alpha,
            target_modules=pattern,
            exclude_modules=dead,
        )
        try:
            _add_adapter(transformer, config)
        except (ValueError, re.error) as error:
            names = ", ".join(repr(name) for name in targets)
            raise UserError(
                f"model.lora.targets = {pattern!r} names no layers that can be adapted; it takes {names} or a regular "
                f"expression for whole module names, such as {next(iter(targets.values()))!r}"
            ) from error


def _add_adapter(transformer: Any, config: LoraConfig) -> None:
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # every process starts from the same adapter, whatever was drawn before
        transformer.add_adapter(config)
    for parameter in _trained(transformer):
        parameter.data = parameter.data.float()  # peft made it in the frozen weights' dtype


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
