import subprocess
import weakref
from pathlib import Path

import memory_table
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sagecli.backends.hunyuanvideo15 import HunyuanVideo15
from sagecli.backends.weights import part_config
from sagecli.config import LoraConfig, ModelConfig
from sagecli.engine.update import trainable

PAGE = (Path(__file__).parent.parent / "docs" / "scaling.md").read_text()


class Alive(TorchDispatchMode):
    """Bytes of the tensors that are alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.sizes = 0, 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata)
                self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        return result

    def gone(self, key):
        self.now -= self.sizes.pop(key)


def closed_form(config: dict, rank: int, feed_forward: bool) -> int:
    """A LoRA has rank x (in + out) a layer: 7 layers in a block's attention, 4 in its feed-forward (one side is 4x as
    wide); the last block's text output has none."""
    layers, width = config["num_layers"], config["num_attention_heads"] * config["attention_head_dim"]
    return rank * width * ((7 * layers - 1) * 2 + (4 * layers - 2) * 5 * feed_forward)


@pytest.mark.parametrize("targets", ["attention", "attention+mlp"])
def test_lora_of_the_tiny_model_has_the_parameters_that_the_script_counts(targets):
    model = ModelConfig(path="tiny", dtype="float32", lora=LoraConfig(rank=3, targets=targets))
    loaded = trainable(HunyuanVideo15(model, torch.device("cpu")).module)
    config = part_config("tiny", "transformer")
    counted = trainable(memory_table.transformer(model, config))
    assert memory_table.size(counted.values()) == memory_table.size(loaded.values())
    assert memory_table.size(loaded.values()) == closed_form(config, 3, targets == "attention+mlp")


def test_lora_of_the_released_model_by_hand():
    model = ModelConfig(lora=LoraConfig(rank=64, alpha=64.0))
    counted = memory_table.size(trainable(memory_table.transformer(model, {})).values())
    assert counted == (7 * 54 - 1) * 64 * (2048 + 2048) == 98_828_288
    assert f"{counted:,}" in PAGE


@pytest.mark.parametrize("tiling", [False, True])
def test_the_decoder_holds_seven_of_its_largest_tensors(tiling):
    with torch.device("meta"), torch.no_grad():
        vae = AutoencoderKLHunyuanVideo15().to(torch.bfloat16)
        assert sum(parameter.numel() for parameter in vae.parameters()) == memory_table.VAE
        if tiling:
            vae.enable_tiling()
        with Alive() as alive:
            vae.decode(torch.empty(1, 32, 6, 22, 39, dtype=torch.bfloat16))
    area = 256 * 256 if tiling else 352 * 624
    assert alive.most == pytest.approx(memory_table.DECODE * 128 * 21 * area * 2, rel=0.015)


def test_the_page_has_the_table_that_the_script_prints():
    assert memory_table.markdown(memory_table.CASES) in PAGE


def test_the_page_s_slurm_script_is_bash():
    script = PAGE.split("```bash\n#!/bin/bash")[1].split("```")[0]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
