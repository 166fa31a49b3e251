"""What several test files share: a tiny HunyuanVideo-1.5 pipeline with random weights, in the real on-disk format."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tiny tensors are faster on one thread; before torch is imported, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backbone", help="test_contracts.py: this registered backbone alone")
    parser.addoption("--model", help="test_contracts.py: folder of a small model of that backbone")
    parser.addoption("--size", default="32x48x5", help="test_contracts.py: height x width x frames it can make")


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def random_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a pipeline of every real class, from a fixed seed: no weight is zero, so nothing hides a mistake.

    2 blocks of width 32; the VAE's ratios are 4 (space) and 2 (time), so 16x24 pixels and 5 frames are 3x4x6 latents.
    """
    import torch
    from diffusers import HunyuanVideo15Pipeline

    folder = tmp_path_factory.mktemp("random") / "pipeline"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        HunyuanVideo15Pipeline(**_text_parts(), **_video_parts()).save_pretrained(folder)
    return folder


def _text_parts() -> dict[str, Any]:
    from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

    tokenizer = _byte_tokenizer()
    qwen = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    t5 = T5Config(vocab_size=384, d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return {
        "text_encoder": Qwen2_5_VLTextModel(qwen),
        "tokenizer": tokenizer,
        "text_encoder_2": T5EncoderModel(t5),
        "tokenizer_2": ByT5Tokenizer(),
    }


def _byte_tokenizer() -> Any:
    """One token a byte, so that the system message has more than the 108 tokens which the pipeline cuts off."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return Qwen2Tokenizer(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="right",
        chat_template=CHAT_TEMPLATE,
    )


def _video_parts() -> dict[str, Any]:
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Transformer3DModel,
    )

    return {
        "transformer": HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=16,
            text_embed_2_dim=24,
            image_embed_dim=8,
            rope_axes_dim=(4, 6, 6),
        ),
        "vae": AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(8, 8, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            scaling_factor=0.5,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "guider": ClassifierFreeGuidance(guidance_scale=2.0),
    }


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def sage() -> Callable[..., Result]:
    """Runs the command line in this process."""

    def run(*arguments: str) -> Result:
        from sagecli.cli import main

        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["sage", *arguments])
            patch.setenv("COLUMNS", "200")
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Result(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="module")
def align(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny VideoAlign."""
    from reward_models import save_videoalign

    return str(save_videoalign(tmp_path_factory.mktemp("models")).folder)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny CLIP."""
    from reward_models import save_clip

    folder = tmp_path_factory.mktemp("models") / "clip"
    save_clip(folder)
    return str(folder)


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Three videos with their prompts beside them, of two sizes."""
    from video_files import moving, save

    folder = tmp_path / "clips"
    folder.mkdir()
    save(folder / "a.mp4", moving(9), sound="aac")
    save(folder / "b.mp4", moving(9, seed=3))
    save(folder / "c.mkv", moving(6, 33, 47, seed=5), "ffv1", "bgr0")
    for name in "abc":
        (folder / f"{name}.txt").write_bytes(b"\xef\xbb\xbf" + f"a square\r\n\r\n number {name}\r\n".encode())
    return folder
