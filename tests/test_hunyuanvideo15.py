"""The HunyuanVideo-1.5 backbone against the stock pipeline, on a tiny pipeline of the real classes."""

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from torch import Tensor
from transformers import Qwen2_5_VLTextModel, T5EncoderModel

from sagecli.backends import VideoSize
from sagecli.backends.hunyuanvideo15 import HunyuanVideo15
from sagecli.backends.weights import locate, transformer_bytes
from sagecli.config import LoraConfig, ModelConfig
from sagecli.engine.noise import gaussian
from sagecli.engine.schedule import sigma_schedule
from sagecli.errors import UserError

PLAIN = "a small red circle"
QUOTED = 'a neon sign that says "open late"'
CURLY = "a shop called “café” and a cat"
SIZE = VideoSize(height=16, width=24, frames=5)
CPU = torch.device("cpu")

Build = Callable[..., HunyuanVideo15]


@pytest.fixture(scope="session")
def build(random_pipeline: Path) -> Build:
    def build(**settings: Any) -> HunyuanVideo15:
        return HunyuanVideo15(ModelConfig(**{"path": str(random_pipeline), "dtype": "float32", **settings}), CPU)

    return build


@pytest.fixture(scope="session")
def full(build: Build) -> HunyuanVideo15:
    return build(train="full")


@pytest.fixture(scope="session")
def stock(random_pipeline: Path) -> HunyuanVideo15Pipeline:
    pipeline = HunyuanVideo15Pipeline.from_pretrained(random_pipeline)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock_velocity(stock: HunyuanVideo15Pipeline, latents: Tensor, sigma: float, prompt: str) -> Tensor:
    """The transformer with the pipeline's padded text, its masks, and its 729 zero image tokens."""
    text, mask, glyphs, glyph_mask = stock.encode_prompt(prompt)
    empty = torch.zeros(1, latents.shape[1] + 1, *latents.shape[2:])
    with torch.no_grad():
        return stock.transformer(
            hidden_states=torch.cat([latents, empty], dim=1),
            timestep=torch.tensor([1000 * sigma]),
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            encoder_hidden_states_2=glyphs,
            encoder_attention_mask_2=glyph_mask,
            image_embeds=torch.zeros(1, 729, stock.transformer.config.image_embed_dim),
        ).sample


def gradients(backbone: HunyuanVideo15, prompt: str) -> dict[str, Tensor | None]:
    """Gradient of every parameter for a loss of one velocity, as the parameters stand."""
    conditioning = backbone.encode([prompt])[prompt]
    latents = backbone.initial_latents([3], SIZE)
    backbone.module.zero_grad(set_to_none=True)
    backbone.velocity(latents, 0.7, conditioning, 1.0).square().mean().backward()
    return {name: parameter.grad for name, parameter in backbone.module.named_parameters()}


@pytest.mark.parametrize("prompt", [PLAIN, QUOTED, CURLY, ""])
def test_velocity_equals_the_stock_transformer_on_padded_text(
    full: HunyuanVideo15, stock: HunyuanVideo15Pipeline, prompt: str
) -> None:
    latents = full.initial_latents([1], SIZE)
    conditioning = full.encode([prompt])[prompt]
    assert (conditioning.glyphs.shape[1] > 0) == (prompt in (QUOTED, CURLY))
    with torch.no_grad():
        velocity = full.velocity(latents, 0.93, conditioning, 1.0)
    torch.testing.assert_close(velocity, stock_velocity(stock, latents, 0.93, prompt), atol=2e-6, rtol=0)


def test_the_timestep_is_not_truncated(full: HunyuanVideo15, stock: HunyuanVideo15Pipeline) -> None:
    latents = full.initial_latents([1], SIZE)
    conditioning = full.encode([PLAIN])[PLAIN]
    with torch.no_grad():
        at, near = (full.velocity(latents, sigma, conditioning, 1.0) for sigma in (0.9371, 0.9376))
    assert (at - near).abs().max() > 1e-5  # both truncate to 937


def test_ode_sampling_equals_the_stock_pipeline(full: HunyuanVideo15, stock: HunyuanVideo15Pipeline) -> None:
    latents = full.initial_latents([5], SIZE)
    conditioning = full.encode([QUOTED])[QUOTED]
    sigma = sigma_schedule(6, shift=5.0)
    theirs = stock(
        QUOTED, height=16, width=24, num_frames=5, num_inference_steps=6, latents=latents, output_type="latent"
    ).frames
    with torch.no_grad():
        for step in range(6):
            velocity = full.velocity(latents, float(sigma[step]), conditioning, 2.0)  # the stock guider's scale
            latents = latents + float(sigma[step + 1] - sigma[step]) * velocity
    torch.testing.assert_close(latents, theirs, atol=1e-4, rtol=0)


def test_guidance_combines_the_prompt_and_the_empty_prompt(full: HunyuanVideo15) -> None:
    latents = full.initial_latents([1, 2], SIZE)
    encoded = full.encode([PLAIN, ""])
    with torch.no_grad():
        prompt = full.velocity(latents, 0.6, encoded[PLAIN], 1.0)
        empty = full.velocity(latents, 0.6, encoded[""], 1.0)
        torch.testing.assert_close(full.velocity(latents, 0.6, encoded[PLAIN], 3.0), empty + 3 * (prompt - empty))
    assert (prompt - empty).abs().max() > 1e-3


def test_a_batch_of_two_equals_one_by_one(full: HunyuanVideo15) -> None:
    latents = full.initial_latents([1, 2], SIZE)
    conditioning = full.encode([QUOTED])[QUOTED]
    with torch.no_grad():
        together = full.velocity(latents, 0.8, conditioning, 2.0)
        single = torch.cat([full.velocity(part, 0.8, conditioning, 2.0) for part in latents.split(1)])
    torch.testing.assert_close(together, single, atol=1e-5, rtol=0)
    assert (together[0] - together[1]).abs().max() > 0.1


@pytest.mark.parametrize("settings", [{"train": "full"}, {"train": "lora"}, {"dtype": "bfloat16"}])
def test_gradients_and_velocity_are_the_same_with_checkpointing(build: Build, settings: dict[str, Any]) -> None:
    plain, checkpointed = build(**settings), build(**settings, gradient_checkpointing=True)
    conditioning = plain.encode([QUOTED])[QUOTED]
    checkpointed.encode([QUOTED])
    latents = plain.initial_latents([1, 2], SIZE)
    with torch.no_grad():
        sampled = plain.velocity(latents, 0.8, conditioning, 2.0)
    for backbone in (plain, checkpointed):  # bitwise, or the ratio on policy would not be 1
        assert torch.equal(backbone.velocity(latents, 0.8, conditioning, 2.0), sampled)
    expected, got = gradients(plain, QUOTED), gradients(checkpointed, QUOTED)
    trained = [name for name, gradient in expected.items() if gradient is not None]
    assert trained
    assert all(torch.equal(expected[name], got[name]) for name in trained)


def test_full_training_freezes_exactly_what_no_gradient_reaches(build: Build) -> None:
    backbone = build(train="full")
    frozen = {name for name, parameter in backbone.module.named_parameters() if not parameter.requires_grad}
    backbone.module.requires_grad_(True)
    reached = {
        name
        for name, gradient in gradients(backbone, QUOTED).items()
        if gradient is not None and gradient.abs().max() > 0
    }
    assert frozen == {name for name, _ in backbone.module.named_parameters()} - reached
    assert {"transformer_blocks.1.attn.to_add_out.weight", "transformer_blocks.1.ff_context.net.2.bias"} <= frozen


@pytest.mark.parametrize(
    "settings",
    [{"train": "full"}, {"lora": LoraConfig(targets="attention")}, {"lora": LoraConfig(targets="attention+mlp")}],
)
@pytest.mark.parametrize("prompt", [PLAIN, QUOTED])
def test_every_trained_parameter_gets_a_gradient_and_no_other(
    build: Build, settings: dict[str, Any], prompt: str
) -> None:
    backbone = build(**settings)
    trained = {name for name, parameter in backbone.module.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, gradient in gradients(backbone, prompt).items() if gradient is not None}
    if "lora" in settings:
        assert trained
        assert all(".lora_A." in name or ".lora_B." in name for name in trained)
        assert any(".ff.net." in name for name in trained) == (settings["lora"].targets == "attention+mlp")
        assert not any("token_refiner" in name for name in trained)


def test_an_adapter_changes_the_model_only_while_it_is_on(build: Build, full: HunyuanVideo15) -> None:
    backbone = build(lora=LoraConfig(rank=4, alpha=8.0))
    latents = full.initial_latents([1], SIZE)
    conditioning = full.encode([PLAIN])[PLAIN]

    @torch.no_grad()
    def velocity(of: HunyuanVideo15) -> Tensor:
        return of.velocity(latents, 0.8, conditioning, 1.0)

    base = velocity(full)
    assert torch.equal(velocity(backbone), base)  # an adapter starts as the identity
    trained = [name for name, parameter in backbone.module.named_parameters() if parameter.requires_grad]
    for name, parameter in backbone.module.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.1)
    adapted = velocity(backbone)
    assert (adapted - base).abs().max() > 1e-3
    backbone.module.disable_adapters()
    assert torch.equal(velocity(backbone), base)
    backbone.module.enable_adapters()
    assert torch.equal(velocity(backbone), adapted)
    assert trained == [name for name, parameter in backbone.module.named_parameters() if parameter.requires_grad]
    with torch.no_grad():  # the folded weight: base + alpha / rank * B A
        layer = backbone.module.get_submodule("transformer_blocks.0.attn.to_q")
        low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        inputs = gaussian(0, 0, (1, 32))
        folded = inputs @ (layer.base_layer.weight + 8.0 / 4 * high @ low).T + layer.base_layer.bias
        torch.testing.assert_close(layer(inputs), folded, atol=1e-5, rtol=0)


def test_an_adapter_starts_the_same_whatever_was_drawn_before(build: Build) -> None:
    torch.manual_seed(1)
    first = build()
    state = torch.random.get_rng_state()
    torch.rand(7)
    second = build()
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_bfloat16_keeps_what_trains_in_float32_and_stays_close(build: Build, full: HunyuanVideo15, train: str) -> None:
    backbone = build(dtype="bfloat16", train=train)
    for parameter in backbone.module.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad or train == "full" else torch.bfloat16)
    latents = full.initial_latents([1, 2], SIZE)
    with torch.no_grad():
        exact = full.velocity(latents, 0.8, full.encode([QUOTED])[QUOTED], 1.0)
        velocity = backbone.velocity(latents, 0.8, backbone.encode([QUOTED])[QUOTED], 1.0)
        videos = backbone.decode(latents)
    assert velocity.dtype == videos.dtype == torch.float32
    assert (velocity - exact).norm() < 0.02 * exact.norm()  # bfloat16 has 8 bits: 0.4 % each, a few of them in a row
    assert not torch.equal(velocity, exact)
    assert (videos - full.decode(latents)).abs().max() < 0.03
    assert all(gradient is None or gradient.dtype == torch.float32 for gradient in gradients(backbone, PLAIN).values())


def test_initial_latents_depend_on_the_seed_alone(full: HunyuanVideo15) -> None:
    latents = full.initial_latents([7, 8, 9], SIZE)
    assert torch.equal(latents[1:2], full.initial_latents([8], SIZE))
    assert torch.equal(latents[2], gaussian(9, 0, (4, 3, 4, 6)))


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (VideoSize(18, 24, 5), "video.height = 18 is not a multiple of 4, .*nearest: 16 or 20"),
        (VideoSize(16, 3, 5), "video.width = 3 is not a multiple of 4, .*nearest: 4"),
        (VideoSize(16, 24, 4), "video.frames = 4 is not a multiple of 2 plus 1, .*nearest: 3 or 5"),
        (VideoSize(16, 24, 0), "video.frames = 0 is not a multiple of 2 plus 1, .*nearest: 1"),
    ],
)
def test_a_size_that_the_model_cannot_make_is_refused(
    full: HunyuanVideo15, random_pipeline: Path, size: VideoSize, words: str
) -> None:
    path = str(random_pipeline)
    for ask in (lambda: full.check_size(path, size), lambda: full.initial_latents([0], size)):
        with pytest.raises(UserError, match=words):
            ask()
    full.check_size(path, VideoSize(4, 8, 1))


def test_a_prompt_is_encoded_once(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = build()
    calls = []
    for encoder in (Qwen2_5_VLTextModel, T5EncoderModel):

        def counted(self: Any, *args: Any, original: Any = encoder.forward, **kwargs: Any) -> Any:
            calls.append(type(self).__name__)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(encoder, "forward", counted)
    first = backbone.encode([PLAIN, QUOTED, PLAIN])
    assert sorted(calls) == ["Qwen2_5_VLTextModel"] * 3 + ["T5EncoderModel"]  # the two and the empty prompt
    again = backbone.encode([QUOTED])
    backbone.free_text_encoders()
    assert torch.equal(backbone.encode([QUOTED])[QUOTED].glyphs, first[QUOTED].glyphs)
    assert torch.equal(again[QUOTED].text, first[QUOTED].text)
    assert len(calls) == 4
    assert list(backbone.encode(["new"])) == ["new"]  # loads them again
    assert len(calls) == 5


def test_text_longer_than_the_encoders_take_is_refused(full: HunyuanVideo15) -> None:
    for prompt in ("long " * 250, f'says "{"x" * 260}"'):
        with pytest.raises(UserError, match=r"is longer than the text encoders take \(1000 tokens, 256 of them"):
            full.encode([prompt])


@pytest.mark.parametrize("size", [SIZE, VideoSize(16, 24, 1)])
def test_decode_equals_the_stock_pipeline(full: HunyuanVideo15, stock: HunyuanVideo15Pipeline, size: VideoSize) -> None:
    latents = 3 * full.initial_latents([1, 2], size)
    videos = full.decode(latents.requires_grad_())
    assert videos.shape == (2, size.frames, 3, 16, 24)
    assert not videos.requires_grad
    assert videos.min() == 0
    assert videos.max() == 1
    for index in range(2):
        assert torch.equal(videos[index : index + 1], full.decode(latents[index : index + 1]))
        with torch.no_grad():
            raw = stock.vae.decode(latents[index : index + 1] / 0.5).sample
        torch.testing.assert_close(videos[index], stock.video_processor.postprocess_video(raw, output_type="pt")[0])


def test_tiles_are_used_when_asked_for(build: Build) -> None:
    latents = gaussian(0, 0, (1, 4, 1, 66, 4))  # 264 pixels high: over the 256 of one tile
    whole, tiled = (build(vae_tiling=tiling).decode(latents) for tiling in (False, True))
    assert tiled.shape == whole.shape == (1, 1, 3, 264, 16)
    assert not torch.equal(tiled, whole)
    assert (tiled - whole).abs().mean() < 0.1


@pytest.mark.parametrize("attention", ["_native_math", "_native_flash"])
def test_another_kernel_gives_the_same_velocity(build: Build, full: HunyuanVideo15, attention: str) -> None:
    latents = full.initial_latents([1], SIZE)
    conditioning = full.encode([PLAIN])[PLAIN]
    with torch.no_grad():
        velocity = build(attention=attention).velocity(latents, 0.8, conditioning, 1.0)
        torch.testing.assert_close(velocity, full.velocity(latents, 0.8, conditioning, 1.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        ("flsh", "'flsh' is unknown; did you mean 'flash'.*; known: flash, .*native.*, sage.*, xformers$"),
        ("flash", "'flash' is not installed: get it by `pip install --no-build-isolation flash-attn`"),
        ("_flash_3", "'_flash_3' is not installed: get it by `pip install .*hopper'`"),
        ("_flash_3_hub", "'_flash_3_hub' is not installed: get it by `pip install 'kernels>=0.12'`"),
        ("sage", "'sage' is not installed: get it by `pip install .*SageAttention.git`"),
        ("xformers", "'xformers' is not installed: get it by `pip install xformers`"),
        ("_native_cudnn", "'_native_cudnn' does not run on cpu in torch.float32: .*; use 'native'"),
    ],
)
def test_attention_that_cannot_serve_is_refused(build: Build, attention: str, words: str) -> None:
    with pytest.raises(UserError, match=f"model.attention = {words}") as caught:
        build(attention=attention)
    assert "\n" not in str(caught.value)


def test_a_kernel_without_a_backward_pass_is_not_trained_with(build: Build) -> None:
    backbone = build()
    for block in backbone.module.transformer_blocks:
        block.attn.processor.attention.trains = False  # as the probe finds for sage
    conditioning = backbone.encode([PLAIN])[PLAIN]
    latents = backbone.initial_latents([1], SIZE)
    with torch.no_grad():
        backbone.velocity(latents, 0.8, conditioning, 1.0)
    with pytest.raises(UserError, match=r"model\.attention = 'native' has no backward pass"):
        backbone.velocity(latents, 0.8, conditioning, 1.0)


@pytest.mark.parametrize("targets", ["attn", "(", r"transformer_blocks\.\d+\.norm1\.norm", r"image_embedder\.linear_1"])
def test_lora_targets_that_name_no_layer_are_refused(build: Build, targets: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"model.lora.targets = {targets!r} names no layers")):
        build(lora=LoraConfig(targets=targets))


def test_lora_targets_of_ones_own(build: Build) -> None:
    backbone = build(lora=LoraConfig(targets=r"proj_out|transformer_blocks\.0\.ff\.net\.2"))
    trained = [name for name, parameter in backbone.module.named_parameters() if parameter.requires_grad]
    assert {name.partition(".lora_")[0] for name in trained} == {"proj_out", "transformer_blocks.0.ff.net.2"}


def break_kind(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "WanPipeline"}))


def break_weights(folder: Path) -> None:
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def missing_weights(path: str) -> str | None:
    """What locate complains of."""
    try:
        locate(path)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda folder: (folder / "model_index.json").unlink(),
            "should hold a HunyuanVideo15Pipeline but holds no pip",
        ),
        (lambda folder: (folder / "model_index.json").write_text("{"), "model_index.json is not JSON"),
        (break_kind, "should hold a HunyuanVideo15Pipeline but holds WanPipeline"),
        (
            lambda folder: shutil.rmtree(folder / "tokenizer_2"),
            "is incomplete: tokenizer_2/ or its config file is miss",
        ),
        (lambda folder: (folder / "vae" / "config.json").unlink(), "is incomplete: vae/ or its config file is missing"),
        (
            lambda folder: (folder / "text_encoder" / "model.safetensors").unlink(),
            "is incomplete: text_encoder/model.safetensors is missing",
        ),
        (
            lambda folder: (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink(),
            "is incomplete: vae/diffusion_pytorch_model.safetensors is missing",
        ),
        (break_weights, "diffusion_pytorch_model.safetensors is not a whole safetensors file"),
        (
            lambda folder: (folder / "vae" / "diffusion_pytorch_model.safetensors").write_text(
                "version https://git-lfs"
            ),
            "diffusion_pytorch_model.safetensors is not a whole safetensors file",
        ),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_refused(
    random_pipeline: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = Path(shutil.copytree(random_pipeline, tmp_path / "pipeline"))
    assert missing_weights(str(folder)) is None
    damage(folder)
    sentence = missing_weights(str(folder))
    assert sentence is not None
    assert words in sentence
    assert "\n" not in sentence
    with pytest.raises(UserError, match=re.escape(words)):
        HunyuanVideo15(ModelConfig(path=str(folder)), CPU)


def test_weights_that_do_not_fit_the_config_are_refused(random_pipeline: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(random_pipeline, tmp_path / "pipeline"))
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 3}))
    with pytest.raises(
        UserError, match="transformer does not fit HunyuanVideo15Transformer3DModel: 32 weights are mis"
    ):
        HunyuanVideo15(ModelConfig(path=str(folder)), CPU)


def test_paths_that_are_nothing_are_refused() -> None:
    assert "'./nowhere' is no folder; it takes a folder, a hub id" in str(missing_weights("./nowhere"))
    assert "get it by `hf download some-one/no-such_model`" in str(missing_weights("some-one/no-such_model"))
    assert "neither a folder nor in the Hugging Face cache" in str(missing_weights("a--b/c"))


def test_a_hub_id_is_served_from_the_cache(
    random_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--owner--name"
    folder = cached / "snapshots" / ("0" * 40)
    shutil.copytree(random_pipeline, folder)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert missing_weights("owner/name") is None
    backbone = HunyuanVideo15(ModelConfig(path="owner/name"), CPU)
    assert next(backbone.module.parameters()).dtype == torch.bfloat16
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert "complete it by `hf download owner/name`" in str(missing_weights("owner/name"))


def test_sharded_weights_load_and_a_missing_shard_is_named(
    random_pipeline: Path, stock: HunyuanVideo15Pipeline, full: HunyuanVideo15, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(random_pipeline, tmp_path / "pipeline"))
    shutil.rmtree(folder / "transformer")
    stock.transformer.save_pretrained(folder / "transformer", max_shard_size="5MB")
    shards = sorted((folder / "transformer").glob("*.safetensors"))
    assert len(shards) > 1
    assert transformer_bytes(str(folder)) == sum(shard.stat().st_size for shard in shards)
    loaded = HunyuanVideo15(ModelConfig(path=str(folder), dtype="float32", train="full"), CPU).module
    for name, parameter in full.module.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name))
    shards[1].unlink()
    assert f"transformer/{shards[1].name} is missing" in str(missing_weights(str(folder)))


def test_size_of_the_transformer_in_bytes(full: HunyuanVideo15, random_pipeline: Path) -> None:
    weights = 4 * sum(parameter.numel() for parameter in full.module.parameters())
    assert 0 < transformer_bytes(str(random_pipeline)) - weights < 20_000  # the rest is the file's header


def test_the_embedded_model_equals_the_stock_transformer() -> None:
    backbone = HunyuanVideo15(ModelConfig(path="tiny", dtype="float32"), CPU)
    pipeline = HunyuanVideo15Pipeline.from_pretrained(locate("tiny"))
    latents = backbone.initial_latents([1], VideoSize(height=32, width=32, frames=9))
    conditioning = backbone.encode([PLAIN])[PLAIN]
    assert conditioning.text.shape[1] < 30  # nothing of the system message is left
    with torch.no_grad():
        velocity = backbone.velocity(latents, 0.93, conditioning, 1.0)
    torch.testing.assert_close(velocity, stock_velocity(pipeline, latents, 0.93, PLAIN), atol=2e-6, rtol=0)


def test_nothing_is_printed_and_no_network_is_asked(
    build: Build, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    backbone = build(gradient_checkpointing=True)
    conditioning = backbone.encode([QUOTED])[QUOTED]
    latents = backbone.initial_latents([1], SIZE)
    backbone.velocity(latents, 0.5, conditioning, 2.0).sum().backward()
    backbone.decode(latents)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
