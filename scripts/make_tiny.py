"""Makes backends/tiny: a HunyuanVideo-1.5 checkpoint in the real format, small enough to train here and ship.

    python scripts/make_tiny.py --work build/make_tiny

takes about an hour on 2 cores. Stopped, it goes on from --work; with --draft it packs what --work holds by now.
"""

import argparse
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from safetensors.torch import load_file, save_file
from tiny_card import write_card
from tiny_data import CAPTIONS, dataset
from tiny_text import WIDTH, build_glyph_encoder, build_text_encoder, build_tokenizer, encode_prompts
from tiny_transformer import PLAN as TRANSFORMER_PLAN
from tiny_transformer import build_transformer, train_transformer
from tiny_vae import PLAN as VAE_PLAN
from tiny_vae import build_vae, encode, train_vae
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
GUIDANCE, SHIFT = 2.0, 5.0
LATENT_CLIPS, LATENT_SEED = 24576, 4
LIMIT_MB = 8


def latents_of(vae: AutoencoderKLHunyuanVideo15, work: Path) -> tuple[Tensor, Tensor]:
    """Latents [N, 16, 3, 4, 4] as the VAE gives them and the row in CAPTIONS of each; kept in work/latents.pt."""
    file = work / "latents.pt"
    if not file.exists():
        clips, captions = dataset(LATENT_CLIPS, LATENT_SEED)
        torch.save({"latents": encode(vae, clips), "captions": captions}, file)
    state = torch.load(file, weights_only=True)
    return state["latents"], state["captions"]


def load_ema(module: nn.Module, file: Path) -> int:
    """Loads the EMA weights of an unfinished training and returns its step; 0 where there is none."""
    if not file.exists():
        return 0
    state = torch.load(file, weights_only=True)
    module.load_state_dict(state["ema"])
    return int(state["step"])


def assemble(
    transformer: HunyuanVideo15Transformer3DModel, vae: AutoencoderKLHunyuanVideo15, out: Path, work: Path
) -> None:
    """Writes the checkpoint's folder whole or not at all, in place of the one that was there."""
    tokenizer = build_tokenizer()
    glyph_tokenizer, glyph_encoder = build_glyph_encoder()
    pipeline = HunyuanVideo15Pipeline(
        text_encoder=build_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        text_encoder_2=glyph_encoder,
        tokenizer_2=glyph_tokenizer,
        guider=ClassifierFreeGuidance(guidance_scale=GUIDANCE),
    )
    beside, before = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.before")
    for leftover in (beside, before):
        shutil.rmtree(leftover, ignore_errors=True)
    pipeline.save_pretrained(beside)
    for name in ("transformer", "vae"):
        file = beside / name / "diffusion_pytorch_model.safetensors"
        save_file({key: value.bfloat16() for key, value in load_file(file).items()}, file, {"format": "pt"})
    write_card(beside, work)
    for file in beside.rglob("*.safetensors"):
        file.chmod(0o644)  # they are written readable to their owner alone
    if out.exists():
        out.rename(before)
    beside.rename(out)
    shutil.rmtree(before, ignore_errors=True)


def zip_megabytes(folder: Path, file: Path) -> float:
    """Size of the folder's zip file, which it writes."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in sorted(folder.rglob("*")):
            archive.write(part, part.relative_to(folder))
    return file.stat().st_size / 1e6


def draft(work: Path) -> tuple[HunyuanVideo15Transformer3DModel, AutoencoderKLHunyuanVideo15]:
    """The two networks as far as work holds them."""
    vae = build_vae()
    transformer = build_transformer(WIDTH, build_glyph_encoder()[1].config.d_model)
    steps = load_ema(vae, work / "vae.pt"), load_ema(transformer, work / "transformer.pt")
    print(f"draft of the VAE's step {steps[0]} and the transformer's step {steps[1]}")
    if (work / "latents.pt").exists():
        vae.register_to_config(scaling_factor=1 / float(latents_of(vae, work)[0].std()))
    return transformer, vae


def trained(
    work: Path, vae_steps: int, transformer_steps: int
) -> tuple[HunyuanVideo15Transformer3DModel, AutoencoderKLHunyuanVideo15]:
    """The two networks after their whole training."""
    vae = train_vae(work, replace(VAE_PLAN, steps=vae_steps))
    latents, captions = latents_of(vae, work)
    scaling_factor = 1 / float(latents.std())
    vae.register_to_config(scaling_factor=scaling_factor)
    tokenizer = build_tokenizer()
    encoder = build_text_encoder(tokenizer)
    texts = encode_prompts(tokenizer, encoder, [str(caption) for caption in CAPTIONS])
    empty = encode_prompts(tokenizer, encoder, [""])
    glyph_width = build_glyph_encoder()[1].config.d_model
    plan = replace(TRANSFORMER_PLAN, steps=transformer_steps)
    return train_transformer(work, latents * scaling_factor, captions, texts, empty, glyph_width, plan), vae


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "make_tiny", help="keeps the training's state")
    parser.add_argument("--out", type=Path, default=ROOT / "backends" / "tiny", help="where the checkpoint goes")
    parser.add_argument("--draft", action="store_true", help="pack what --work holds, without training")
    parser.add_argument("--vae-steps", type=int, default=VAE_PLAN.steps)
    parser.add_argument("--transformer-steps", type=int, default=TRANSFORMER_PLAN.steps)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.draft:
        transformer, vae = draft(arguments.work)
    else:
        transformer, vae = trained(arguments.work, arguments.vae_steps, arguments.transformer_steps)
    assemble(transformer, vae, arguments.out, arguments.work)
    size = zip_megabytes(arguments.out, arguments.work / "tiny.zip")
    print(f"{arguments.out}: {size:.1f} MB zipped")
    if size > LIMIT_MB:
        raise SystemExit(f"the checkpoint is {size:.1f} MB zipped; the limit is {LIMIT_MB} MB")


if __name__ == "__main__":
    main()
