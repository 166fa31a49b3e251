import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from reward_models import save_clip
from torch import Tensor

from sagecli.errors import UserError
from sagecli.rewards import even_frames
from sagecli.rewards.clip import ClipScore
from sagecli.rewards.pickscore import PickScore

PROMPTS = ["a red kite", "red", "zzz quiet water!"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip") / "clip"
    save_clip(folder)
    return folder


def loaded(folder: Path, **options: object) -> ClipScore:
    reward = ClipScore(str(folder), **options)  # type: ignore[arg-type]
    reward.load()
    return reward


def clips(count: int, frames: int = 11, height: int = 40, width: int = 56) -> Tensor:
    coarse = torch.rand(count, 3, 4, 5, 6, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.interpolate(coarse, (frames, height, width), mode="trilinear").transpose(1, 2)


def by_hand(folder: Path, video: Tensor, prompt: str) -> list[float]:
    """Cosines of a video's frames and a prompt, from the model's own logits and pictures made with PIL."""
    from transformers import AutoTokenizer, CLIPModel

    model = CLIPModel.from_pretrained(folder)
    pixels = []
    for frame in (video * 255).round().byte().permute(0, 2, 3, 1).numpy():
        height, width = frame.shape[:2]
        wide = int(32 * width / height)
        small = Image.fromarray(frame).resize((wide, 32), Image.Resampling.BICUBIC)
        left = (wide - 32) // 2
        values = np.asarray(small.crop((left, 0, left + 32, 32))) / 255
        mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        pixels.append((values - mean) / std)
    tokens = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
    batch = torch.tensor(np.stack(pixels), dtype=torch.float32).permute(0, 3, 1, 2)
    logits = model(pixel_values=batch, **tokens).logits_per_image[:, 0]
    return [float(value) for value in logits / model.logit_scale.exp()]


@torch.no_grad()
def test_clipscore_is_the_mean_cosine_of_eight_frames(folder):
    videos = clips(3)
    scores = loaded(folder)(videos, PROMPTS, 8.0)
    for index, prompt in enumerate(PROMPTS):
        chosen = videos[index, [round(place * 10 / 7) for place in range(8)]]
        cosine = np.mean(by_hand(folder, chosen, prompt))
        assert scores.details[index]["raw"]["CLIPScore"] == pytest.approx(cosine, abs=1e-5)
        assert float(scores.axes["CLIPScore"][index]) == pytest.approx(2.5 * max(cosine, 0), abs=1e-5)
        assert scores.details[index]["scale"] == "x2.5"


@torch.no_grad()
def test_the_scales(folder):
    videos = torch.rand(2, 9, 3, 60, 80, generator=torch.Generator().manual_seed(0))

    def score(scale: str) -> Tensor:
        return loaded(folder, scale=scale)(videos, ["a red ball", "x" * 80], 8.0).axes["CLIPScore"]

    cosine = score("cosine")
    assert cosine[1] < 0 < cosine[0]
    torch.testing.assert_close(score("x2.5"), 2.5 * cosine.clamp(min=0))
    torch.testing.assert_close(score("div30"), cosine * 100 / 30)


@torch.no_grad()
def test_pickscore_scales_by_the_models_own_temperature(folder):
    reward = PickScore(str(folder))
    reward.load()
    scale = math.exp(2.6592)  # CLIP's logit_scale at initialisation
    cosine = loaded(folder, scale="cosine")(clips(3), PROMPTS, 8.0).axes["CLIPScore"]
    torch.testing.assert_close(reward(clips(3), PROMPTS, 8.0).axes["PickScore"], cosine * scale / 26)


@torch.no_grad()
def test_the_legacy_layout_scores_the_same(folder, tmp_path):
    save_clip(tmp_path / "legacy", legacy=True)
    expected = loaded(folder)(clips(3), PROMPTS, 8.0).axes["CLIPScore"]
    torch.testing.assert_close(loaded(tmp_path / "legacy")(clips(3), PROMPTS, 8.0).axes["CLIPScore"], expected)


@torch.no_grad()
def test_a_batch_scores_as_one_by_one(folder):
    reward = loaded(folder, scale="cosine")
    together = reward(clips(3), PROMPTS, 8.0).axes["CLIPScore"]
    for index, prompt in enumerate(PROMPTS):
        alone = reward(clips(3)[index : index + 1], [prompt], 8.0).axes["CLIPScore"]
        assert float(alone) == pytest.approx(float(together[index]), abs=1e-5)


@torch.no_grad()
def test_long_prompts_are_cut_and_said_to_be(folder):
    reward = loaded(folder)
    long = ["x" * 75, "x" * 76, "x" * 200]  # one token a letter, and the two that begin and end a text
    scores = reward(clips(3), long, 8.0)
    assert [index for index, _ in scores.warnings] == [1, 2]
    assert "longer than 77 tokens" in scores.warnings[0][1]
    same = reward(clips(1).expand(2, -1, -1, -1, -1), long[1:], 8.0).details
    assert same[0]["raw"]["CLIPScore"] == pytest.approx(same[1]["raw"]["CLIPScore"], abs=1e-6)


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [(11, 8, [0, 1, 3, 4, 6, 7, 9, 10]), (3, 8, [0, 1, 2]), (1, 8, [0]), (9, 1, [4]), (81, 2, [0, 80])],
)
def test_even_frames(total, count, expected):
    assert even_frames(total, count) == expected


def test_what_is_missing_is_one_sentence(folder, tmp_path):
    import shutil

    def spoiled(name: str) -> str:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        (copy / name).unlink()
        return str(copy)

    with pytest.raises(UserError, match=r"no model.safetensors or pytorch_model.bin; is this a CLIP model's folder"):
        ClipScore(spoiled("model.safetensors"))
    with pytest.raises(UserError, match="its tokenizer is missing"):
        ClipScore(spoiled("tokenizer.json"))
    with pytest.raises(UserError, match="its image processor is missing"):
        ClipScore(spoiled("preprocessor_config.json"))
    with pytest.raises(
        UserError, match=r"'openai/clip.*' is neither a folder nor in the Hugging Face cache; get it by"
    ):
        ClipScore()


def test_another_models_weights_are_refused(folder, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    weights["visual_projection.weight"] = weights["visual_projection.weight"].repeat(2, 1)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError,
        match=r"does not fit CLIPModel: 1 weights are missing, unknown or misshapen, first visual_projection.weight",
    ):
        loaded(copy)
    (copy / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UserError, match=r"model\.safetensors is a Git LFS pointer"):
        loaded(copy)
    del weights["visual_projection.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"1 weights are missing, unknown or misshapen, first visual_projection.weight"):
        loaded(copy)
