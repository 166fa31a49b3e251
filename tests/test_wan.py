"""The Wan backbone against diffusers' own pipeline, on tiny pipelines of the real classes."""

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from tiny_wan import save_wan
from torch import Tensor

from sagecli.backends import VideoSize
from sagecli.backends.wan import Wan
from sagecli.backends.wan_attention import FILLERS, TextAttention, filler_weights
from sagecli.config import Config, ModelConfig
from sagecli.engine.samples import Scored
from sagecli.engine.schedule import sigma_schedule
from sagecli.engine.train import train_round
from sagecli.engine.update import Learner
from sagecli.errors import UserError

PROMPT = "a red cat moving left,  the &amp; ball"
SIZE = VideoSize(32, 48, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wan(tmp_path_factory.mktemp("wan") / "pipeline")


@pytest.fixture(scope="module")
def ti2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Wan 2.2 TI2V-5B: a timestep for every token, a residual VAE on patches of pixels, 16 times in space."""
    folder = save_wan(tmp_path_factory.mktemp("wan22") / "pipeline")
    vae = AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.5, 2.0, 1.0],
    )
    vae.save_pretrained(folder / "vae")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"expand_timesteps": True}))
    return folder


def build(folder: Path, **settings: Any) -> Wan:
    table = {"path": str(folder), "dtype": "float32", "train": "frozen"} | settings
    return Wan(ModelConfig.model_validate(table), torch.device("cpu"))


def stock(folder: Path) -> WanPipeline:
    pipeline = WanPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_velocity_equals_the_stock_transformer_on_512_text_tokens(folder):
    backbone, pipeline = build(folder), stock(folder)
    latents = backbone.initial_latents([1, 2], SIZE)
    for prompt in (PROMPT, "", "the"):
        text, _ = pipeline.encode_prompt(prompt, do_classifier_free_guidance=False, max_sequence_length=512)
        with torch.no_grad():
            theirs = pipeline.transformer(latents, torch.full((2,), 930.0), text.expand(2, -1, -1)).sample
            ours = backbone.velocity(latents, 0.93, backbone.encode([prompt])[prompt], 1.0)
        torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_fillers_weights_stand_for_all_of_them_in_any_dtype(dtype):
    for count in range(4, 513):
        weights = filler_weights(count, dtype)
        assert torch.tensor(weights, dtype=dtype).tolist() == list(weights)
        assert sum(map(math.exp, weights)) == pytest.approx(count, rel=1e-5)


def test_the_longest_texts_keep_every_filler(folder):
    """Attention to text with 1 to 5 fillers of 512, against attention to all 512 tokens."""
    backbone = build(folder)
    attention = backbone.module.blocks[0].attn2
    text = torch.randn(1, 512, attention.to_k.in_features, generator=torch.Generator().manual_seed(0))
    states = torch.randn(1, 6, attention.to_q.in_features, generator=torch.Generator().manual_seed(1))
    for fillers in range(1, 6):
        filled = text.clone()
        filled[:, 512 - fillers :] = 0
        expected = WanAttnProcessor()(attention, states, filled, None, None)
        given = filled[:, : 512 - fillers + FILLERS]
        torch.testing.assert_close(TextAttention()(attention, states, given, None, None), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("length", [1, 20, 60, 300])
def test_in_bfloat16_the_text_is_no_further_from_float32_than_the_stock_attention(length):
    """A single filler would be 1.2 to 1.5 times as far, by its weight alone."""
    torch.manual_seed(0)
    half = WanAttention(dim=256, heads=4, dim_head=64, cross_attention_dim_head=64).bfloat16()
    whole = copy.deepcopy(half).float()
    text = torch.zeros(1, 512, 256, dtype=torch.bfloat16)
    text[:, :length] = torch.randn(1, length, 256)
    states = torch.randn(1, 200, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = WanAttnProcessor()(whole, states.float(), text.float(), None, None)
        theirs = (WanAttnProcessor()(half, states, text, None, None) - exact).norm()
        ours = (TextAttention()(half, states, text[:, : length + FILLERS], None, None) - exact).norm()
    assert ours < 1.05 * theirs < 0.004 * exact.norm()


class StatedSigmas(FlowMatchEulerDiscreteScheduler):
    """The pipeline takes no sigmas: this scheduler always uses METHOD.md's."""

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        super().set_timesteps(sigmas=torch.linspace(1, 0, num_inference_steps + 1)[:-1].numpy(), device=device)


@pytest.mark.parametrize("kind", ["folder", "ti2v"])
def test_ode_sampling_and_decoding_equal_the_stock_pipeline(kind, request):
    folder = request.getfixturevalue(kind)
    size = VideoSize(32, 64, 5) if kind == "ti2v" else SIZE
    backbone, pipeline = build(folder), stock(folder)
    pipeline.scheduler = StatedSigmas(shift=3.0)
    latents = backbone.initial_latents([5, 6], size)
    conditioning = backbone.encode([PROMPT])[PROMPT]
    shape = {"height": size.height, "width": size.width, "num_frames": size.frames}
    arguments = {"num_inference_steps": 6, "guidance_scale": 4.0, "prompt": [PROMPT, PROMPT], "latents": latents}
    theirs = pipeline(**shape, **arguments, output_type="latent").frames
    videos = pipeline(**shape, **arguments, output_type="pt").frames
    sigma = sigma_schedule(6, shift=3.0)
    with torch.no_grad():
        for step in range(6):
            velocity = backbone.velocity(latents, float(sigma[step]), conditioning, 4.0)
            latents = latents + float(sigma[step + 1] - sigma[step]) * velocity
    torch.testing.assert_close(latents, theirs, atol=1e-4, rtol=0)
    assert theirs.std() > 0.1
    torch.testing.assert_close(backbone.decode(latents), videos, atol=1e-4, rtol=0)


def test_a_prompt_that_fills_the_text_is_refused(folder):
    backbone = build(folder)
    backbone.encode(["x " * 250])
    with pytest.raises(UserError, match=r"'x x .*\.\.\. has 512 tokens or more; shorten it"):
        backbone.encode(["x " * 600])


def test_other_wans_are_refused(folder, tmp_path):
    two = Path(shutil.copytree(folder, tmp_path / "two"))
    shutil.copytree(two / "transformer", two / "transformer_2")
    with pytest.raises(UserError, match="splits its steps over two transformers"):
        build(two)
    images = Path(shutil.copytree(folder, tmp_path / "images"))
    WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=9,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=1,
    ).save_pretrained(images / "transformer")
    with pytest.raises(UserError, match="is guided by images"):
        build(images)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_the_engine_trains_it(folder, train):
    config = Config.model_validate(
        {
            "model": {"backbone": "wan", "path": str(folder), "dtype": "float32", "train": train},
            "video": {"height": 32, "width": 48, "frames": 5},
            "sampler": {"steps": 4, "guidance": 2.0, "shift": 3.0},
            "reward": {"models": [{"name": "shapes", "weights": {"VQ": 1.0}}]},
            "optimizer": {"lr": 1e-3},
            "train": {"prompts": "-", "rounds": 2, "groups_per_round": 2, "group_size": 3, "micro_batch": 2},
            "eval": {"prompts": "-"},
        }
    )
    backbone = Wan(config.model, torch.device("cpu"))
    backbone.encode([PROMPT])
    learner = Learner(config, backbone)

    def score(videos: Tensor, prompts: list[str]) -> Scored:
        return Scored({"VQ": videos.double().mean((1, 2, 3, 4))}, {}, {})

    before = [parameter.detach().clone() for parameter in learner.parameters.values()]
    updates = [train_round(learner, backbone, score, [PROMPT], lambda: None).updates[0] for _ in range(2)]
    assert [metrics["ratio_error"] for metrics in updates] == [0.0, 0.0]
    assert all(metrics["gradient_norm"] > 0 for metrics in updates)
    assert any(not torch.equal(old, new) for old, new in zip(before, learner.parameters.values(), strict=True))
