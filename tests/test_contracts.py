"""What every backbone must do; `pytest tests/test_contracts.py --backbone NAME --model FOLDER` for one of your own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_wan import save_wan
from torch import Tensor

from sagecli import registry
from sagecli.backends import Backbone, VideoSize
from sagecli.config import ModelConfig
from sagecli.errors import UserError

PROMPTS = ['a red ball that says "left"', "snow"]
Build = Callable[..., Backbone]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    one = metafunc.config.getoption("--backbone")
    metafunc.parametrize("name", [one] if one else registry.names("backends"), scope="module")


@pytest.fixture(scope="module")
def folder(name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model of the backbone: the one that --model names, or a tiny random one of a built-in backbone."""
    if given := request.config.getoption("--model"):
        return str(given)
    if name == "hunyuanvideo15":
        return str(request.getfixturevalue("random_pipeline"))
    if name == "wan":
        return str(save_wan(tmp_path_factory.mktemp("wan") / "pipeline"))
    pytest.skip(f"--model FOLDER is needed for the backbone {name}")


@pytest.fixture(scope="module")
def size(request: pytest.FixtureRequest) -> VideoSize:
    height, width, frames = map(int, request.config.getoption("--size").split("x"))
    return VideoSize(height, width, frames)


@pytest.fixture(scope="module")
def build(name: str, folder: str) -> Build:
    def make(**settings: Any) -> Backbone:
        model = ModelConfig.model_validate({"backbone": name, "path": folder, "dtype": "float32"} | settings)
        backbone: Backbone = registry.load("backends", name)(model, torch.device("cpu"))
        return backbone

    return make


@pytest.fixture(scope="module")
def frozen(build: Build) -> Backbone:
    return build(train="frozen")


def velocity(backbone: Backbone, latents: Tensor, prompt: str = PROMPTS[0], guidance: float = 2.0) -> Tensor:
    return backbone.velocity(latents, 0.8, backbone.encode([prompt])[prompt], guidance)


def test_velocity_is_deterministic_and_has_the_latents_shape(frozen, size):
    latents = frozen.initial_latents([1], size)
    with torch.no_grad():
        first, second = velocity(frozen, latents), velocity(frozen, latents)
    assert torch.equal(first, second)
    assert (first.shape, first.dtype) == (latents.shape, torch.float32)
    assert first.std() > 1e-3


def test_velocity_depends_on_prompt_sigma_and_guidance(frozen, size):
    latents = frozen.initial_latents([1], size)
    encoded = frozen.encode(PROMPTS)
    with torch.no_grad():
        base = frozen.velocity(latents, 0.8, encoded[PROMPTS[0]], 1.0)
        others = [
            frozen.velocity(latents, 0.8, encoded[PROMPTS[1]], 1.0),
            frozen.velocity(latents, 0.7999, encoded[PROMPTS[0]], 1.0),
            frozen.velocity(latents, 0.8, encoded[PROMPTS[0]], 3.0),
        ]
    assert all(not torch.equal(base, other) for other in others)


def test_guidance_moves_away_from_the_empty_prompt(frozen, size):
    latents = frozen.initial_latents([1], size)
    encoded = frozen.encode([PROMPTS[0], ""])
    with torch.no_grad():
        prompt, empty = (frozen.velocity(latents, 0.6, encoded[text], 1.0) for text in (PROMPTS[0], ""))
        guided = frozen.velocity(latents, 0.6, encoded[PROMPTS[0]], 3.0)
    torch.testing.assert_close(guided, empty + 3 * (prompt - empty), atol=1e-5, rtol=1e-5)


def test_a_batch_of_two_equals_one_by_one(frozen, size):
    latents = frozen.initial_latents([1, 2], size)
    with torch.no_grad():
        together = velocity(frozen, latents)
        single = torch.cat([velocity(frozen, part) for part in latents.split(1)])
    torch.testing.assert_close(together, single, atol=1e-5, rtol=1e-5)
    decoded = frozen.decode(latents)
    torch.testing.assert_close(
        decoded, torch.cat([frozen.decode(part) for part in latents.split(1)]), atol=1e-5, rtol=0
    )


def test_initial_latents_are_standard_normal_and_belong_to_their_seeds(frozen, size):
    latents = frozen.initial_latents(list(range(8)), size)
    assert latents.dtype == torch.float32
    assert abs(float(latents.mean())) < 5 / latents.numel() ** 0.5
    assert abs(float(latents.std()) - 1) < 5 / latents.numel() ** 0.5
    assert torch.equal(frozen.initial_latents([5, 2, 5], size), latents[[5, 2, 5]])


def test_decoded_videos_have_the_size_and_the_range(frozen, size):
    videos = frozen.decode(3 * frozen.initial_latents([1, 2], size))
    assert videos.shape == (2, size.frames, 3, size.height, size.width)
    assert videos.dtype == torch.float32
    assert 0 <= float(videos.min()) < float(videos.max()) <= 1
    assert not torch.equal(videos[0], videos[1])


def test_sizes_that_the_model_cannot_make_are_refused(frozen, folder, size):
    frozen.check_size(folder, size)
    for wrong in (VideoSize(size.height + 1, size.width, size.frames), VideoSize(size.height, size.width, 0)):
        for ask in (
            lambda wrong=wrong: frozen.check_size(folder, wrong),
            lambda wrong=wrong: frozen.initial_latents([0], wrong),
        ):
            with pytest.raises(UserError, match=r"video\.(height|frames) = \d+ is not a multiple"):
                ask()


def test_weights_are_weighed_and_missing_ones_named(frozen, folder, tmp_path):
    count = sum(parameter.numel() for parameter in frozen.module.parameters())
    assert frozen.weight_bytes(folder) > count
    with pytest.raises(UserError):
        frozen.weight_bytes(str(tmp_path / "nothing"))


def test_a_prompt_is_encoded_once_and_outlives_the_text_encoders(build, size, monkeypatch):
    from transformers import PreTrainedModel

    backbone = build(train="frozen")
    latents = backbone.initial_latents([1], size)
    with torch.no_grad():
        before = velocity(backbone, latents)
        backbone.free_text_encoders()
        monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *args, **kwargs: pytest.fail("loaded again"))
        assert torch.equal(velocity(backbone, latents), before)


def test_an_adapter_that_is_off_is_the_base_exactly(build, frozen, size):
    backbone = build(train="lora", lora={"rank": 4, "alpha": 8.0})
    latents = frozen.initial_latents([1, 2], size)
    with torch.no_grad():
        base = velocity(frozen, latents)
        assert torch.equal(velocity(backbone, latents), base)  # an adapter starts as the identity
        for name, parameter in backbone.module.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        adapted = velocity(backbone, latents)
        assert (adapted - base).abs().max() > 1e-3
        backbone.module.disable_adapters()
        assert torch.equal(velocity(backbone, latents), base)
        backbone.module.enable_adapters()
        assert torch.equal(velocity(backbone, latents), adapted)


@pytest.mark.parametrize(
    "settings",
    [
        {"train": "full"},
        {"train": "lora", "lora": {"rank": 2, "alpha": 2.0, "targets": "attention"}},
        {"train": "lora", "lora": {"rank": 2, "alpha": 2.0, "targets": "attention+mlp"}},
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_exactly_the_trained_parameters(build, size, settings, checkpointing):
    backbone = build(**settings, gradient_checkpointing=checkpointing)
    trained = {name for name, parameter in backbone.module.named_parameters() if parameter.requires_grad}
    assert trained
    for name, parameter in backbone.module.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.1)
    for prompt in PROMPTS:
        backbone.module.zero_grad()
        velocity(backbone, backbone.initial_latents([1, 2], size), prompt).square().mean().backward()
        reached = {name for name, parameter in backbone.module.named_parameters() if parameter.grad is not None}
        assert reached == trained
        assert all(bool(p.grad.isfinite().all()) for p in backbone.module.parameters() if p.grad is not None)


def test_gradient_checkpointing_changes_no_gradient(build, size):
    plain, checkpointed = build(train="full"), build(train="full", gradient_checkpointing=True)
    for backbone in (plain, checkpointed):
        velocity(backbone, backbone.initial_latents([1, 2], size)).square().mean().backward()
    others = dict(checkpointed.module.named_parameters())
    for name, parameter in plain.module.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, others[name].grad), name


def test_bfloat16_keeps_latents_and_velocities_in_float32(build, frozen, size):
    backbone = build(train="lora", dtype="bfloat16")
    latents = backbone.initial_latents([1], size)
    with torch.no_grad():
        half, whole = velocity(backbone, latents), velocity(frozen, latents)
    assert half.dtype == torch.float32
    assert 0 < float((half - whole).abs().max()) < 0.2 * float(whole.std()) + 0.05
    assert all(p.dtype == torch.float32 for p in backbone.module.parameters() if p.requires_grad)
    assert backbone.decode(latents).dtype == torch.float32


def test_the_files_of_another_model_are_refused(build, tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(UserError, match=r"should hold a \w+ but holds StableDiffusionPipeline"):
        build(path=str(tmp_path))


def test_the_pipeline_folder_is_only_read(folder, build, size):
    before = {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*")}
    velocity(build(train="lora"), build(train="frozen").initial_latents([1], size))
    assert {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*")} == before
