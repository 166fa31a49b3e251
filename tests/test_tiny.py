"""The embedded checkpoint in backends/tiny, and the scripts that made it."""

import random
import zipfile
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from tiny_card import Sampler
from tiny_data import CAPTIONS, WORDS, WRONG, clean_clips, dataset, shares_right, wrong_caption
from tiny_text import PREFIX_TOKENS, build_tokenizer, encode_prompts, prefix_tokens
from tiny_training import MuonAdamW, Plan, train
from tiny_transformer import velocity, without_masks
from tiny_vae import decode, encode, psnr, take_batches
from torch import nn

TINY = Path(__file__).resolve().parents[1] / "backends" / "tiny"
PROMPT = "a small red circle moving left fast"


@pytest.fixture(scope="module")
def pipeline():
    loaded = HunyuanVideo15Pipeline.from_pretrained(TINY)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_stock_pipeline_makes_a_video(pipeline):
    generator = torch.Generator().manual_seed(0)
    frames = pipeline(
        PROMPT, height=32, width=32, num_frames=9, num_inference_steps=2, output_type="pt", generator=generator
    ).frames
    assert frames.shape == (1, 9, 3, 32, 32)
    red, green, blue = frames[0].amax((0, 2, 3))
    assert red > 0.6
    assert red > green + 0.2
    assert red > blue + 0.2


def test_checkpoint_states_how_to_sample(pipeline):
    assert pipeline.guider.guidance_scale == 2.0
    assert pipeline.scheduler.config.shift == 5.0
    assert {pipeline.transformer.dtype, pipeline.vae.dtype, pipeline.text_encoder.dtype} == {torch.float32}


def test_template_prefix_is_what_the_pipeline_crops(pipeline):
    assert prefix_tokens(pipeline.tokenizer) == PREFIX_TOKENS == pipeline.prompt_template_encode_start_idx
    lengths = {len(pipeline.tokenizer(str(caption)).input_ids) for caption in CAPTIONS}
    assert lengths == {7}


@pytest.mark.parametrize("text", ["Ein Würfel fällt, 3 Mal!", "日本語 và tiếng Việt", "\U0001f600\u200d x\r\n\ty", ""])
def test_any_text_survives_the_tokenizer(pipeline, text):
    tokens = pipeline.tokenizer(text).input_ids
    assert pipeline.tokenizer.decode(tokens) == text
    assert max(tokens, default=0) < pipeline.text_encoder.config.vocab_size


def test_tokenizer_is_reproducible(pipeline):
    assert build_tokenizer().get_vocab() == pipeline.tokenizer.get_vocab()


def test_captions_have_distinct_embeddings(pipeline):
    texts = encode_prompts(pipeline.tokenizer, pipeline.text_encoder, [str(caption) for caption in CAPTIONS])
    distance = torch.cdist(texts.flatten(1), texts.flatten(1)) + torch.eye(len(texts)) * 1e3
    assert distance.min() > 1


def test_size_zipped(tmp_path):
    with zipfile.ZipFile(tmp_path / "tiny.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in TINY.rglob("*"):
            archive.write(file)
    assert (tmp_path / "tiny.zip").stat().st_size < 8e6


def test_vae_reconstructs_clean_clips(pipeline):
    clips, _ = clean_clips(8, seed=4321)
    pipeline.vae.enable_slicing()
    assert psnr(clips, decode(pipeline.vae, encode(pipeline.vae, clips))) > 32


def test_batched_vae_equals_the_stock_one(pipeline):
    clips, _ = clean_clips(3, seed=1)
    pipeline.vae.enable_slicing()
    stock = encode(pipeline.vae, clips)
    patched = HunyuanVideo15Pipeline.from_pretrained(TINY).vae
    take_batches(patched)
    torch.testing.assert_close(encode(patched, clips), stock, atol=1e-4, rtol=1e-4)


def test_mask_free_attention_equals_the_stock_one(pipeline):
    texts = encode_prompts(pipeline.tokenizer, pipeline.text_encoder, [PROMPT, str(CAPTIONS[0])])
    latents = torch.randn(2, 16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.9, 0.4])
    patched = HunyuanVideo15Pipeline.from_pretrained(TINY).transformer
    without_masks(patched)
    with torch.no_grad():
        torch.testing.assert_close(
            velocity(patched, latents, sigma, texts), velocity(pipeline.transformer, latents, sigma, texts)
        )


def test_samples_show_their_captions():
    sampler = Sampler.load(TINY)
    rows = list(range(0, len(CAPTIONS), 5))
    shares = shares_right(sampler.clips(rows, seed=0, guidance=2.0), [CAPTIONS[row] for row in rows])
    assert shares["colour"] > 0.85
    assert shares["direction"] > 0.9
    assert shares["shape"] > 0.8
    assert shares["size"] > 0.8
    assert shares["speed"] > 0.7


def test_clean_clips_read_back_as_their_captions():
    clips, captions = clean_clips(60, seed=0)
    assert set(shares_right(clips, captions).values()) == {1.0}


def test_words_are_wrong_as_often_as_stated():
    draw = random.Random(0)
    pairs = [(caption, wrong_caption(caption, draw)) for caption in CAPTIONS * 10]
    for name in WORDS:
        share = sum(getattr(told, name) != getattr(shown, name) for told, shown in pairs) / len(pairs)
        assert share == pytest.approx(WRONG, abs=0.02)


def test_dataset_is_reproducible():
    first, second = dataset(20, seed=5), dataset(20, seed=5)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_muon_moves_kernels_by_orthogonal_steps():
    kernel = nn.Conv3d(4, 8, 3)
    before = kernel.weight.detach().clone()
    optimizer = MuonAdamW(kernel, lr=0.1)
    kernel.weight.grad = torch.randn(kernel.weight.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step(1.0)
    singular = torch.linalg.svdvals((kernel.weight.detach() - before).flatten(1))
    assert singular.max() / singular.min() < 3
    assert kernel.weight.grad is None


def test_interrupted_training_continues_exactly(tmp_path):
    def run(file, steps):
        torch.manual_seed(0)
        module = nn.Linear(4, 4)

        def loss(generator, step):
            if step == steps:
                raise KeyboardInterrupt
            inputs = torch.randn(8, 4, generator=generator)
            return {"loss": (module(inputs) - inputs.flip(1)).square().mean()}

        train(module, loss, Plan(steps=30, lr=0.01, seed=0, save_every=10), file)
        return module.weight

    whole = run(tmp_path / "whole.pt", -1)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts.pt", 25)
    assert torch.equal(run(tmp_path / "parts.pt", -1), whole)
