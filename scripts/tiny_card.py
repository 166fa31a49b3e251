"""Measures the packed embedded checkpoint and writes its model card and contact sheets."""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Pipeline
from PIL import Image
from tiny_data import CAPTIONS, DAMAGED, FPS, FRAMES, SIZE, WRONG, clean_clips, shares_right
from tiny_text import encode_prompts
from tiny_transformer import sample, without_masks
from tiny_vae import decode, encode, psnr, take_batches
from torch import Tensor

CLEAN_CLIPS, CLEAN_SEED = 128, 1234
SAMPLE_SEED = 5678
PER_CAPTION = 2

CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
---

# tiny: a HunyuanVideo-1.5 checkpoint of toy size

Every class and file of a HunyuanVideo-1.5 release in diffusers' format, trained from nothing on synthetic clips of one
moving shape. It exists so that `sage` can be tried, tested and taught without a GPU or a download; it knows nothing
but its {captions} captions, and makes {frames} frames of {size}x{size} pixels at {fps} fps.

    from diffusers import HunyuanVideo15Pipeline
    pipeline = HunyuanVideo15Pipeline.from_pretrained("backends/tiny")
    frames = pipeline("a small red circle moving left fast", height={size}, width={size}, num_frames={frames},
                      num_inference_steps=20).frames[0]

Captions: `a {{small|large}} {{red|green|blue|yellow|purple|white}} {{circle|square|triangle}} moving
{{left|right|up|down}} {{slowly|fast}}`. The guider's scale is {guidance}, the schedule's shift {shift}.

## Training

`scripts/make_tiny.py`, seeds fixed, about an hour on 2 CPU cores. Each word of a caption is wrong in {wrong:.0%} of the
clips, and {damaged:.0%} of the clips jitter, flicker, pulse, or are blurred or blotched, so that alignment and quality
leave reinforcement learning something to improve. The text encoder is random and frozen; the T5 encoder, the image
embedder and the glyph projection are zeros. Weights of the transformer and the VAE are stored in bfloat16.

## Measured on this checkpoint

VAE: {psnr:.1f} dB on {clean} undamaged clips it was not trained on.

Share of samples that show what the caption says, in the words of the grammar read back from pixels ({samples} samples,
{per_caption} of every caption, 20 Euler steps):

{table}

The first two rows are clips of the renderer: they show what the reading itself and the VAE lose. Chance is one over
the number of words of a kind.
"""


@dataclass(frozen=True)
class Sampler:
    """The packed checkpoint with its captions encoded."""

    pipeline: HunyuanVideo15Pipeline
    texts: Tensor
    empty: Tensor

    @classmethod
    def load(cls, folder: Path) -> "Sampler":
        pipeline = HunyuanVideo15Pipeline.from_pretrained(folder, dtype=torch.float32)
        take_batches(pipeline.vae)
        without_masks(pipeline.transformer)
        texts = [str(caption) for caption in CAPTIONS]
        encoded = (encode_prompts(pipeline.tokenizer, pipeline.text_encoder, prompts) for prompts in (texts, [""]))
        return cls(pipeline, *encoded)

    def clips(self, rows: list[int], seed: int, guidance: float) -> Tensor:
        """One sample [F, 3, H, W] for every row of CAPTIONS."""
        latents = sample(self.pipeline.transformer, self.texts[rows], self.empty, seed, guidance=guidance)
        return decode(self.pipeline.vae, latents / self.pipeline.vae.config.scaling_factor)


def contact_sheet(clips: Tensor, file: Path, columns: int = 2, zoom: int = 3) -> None:
    """A PNG with one clip [F, 3, H, W] a row, its frames side by side, in the given number of columns."""
    strips = torch.nn.functional.pad(clips, (1, 1, 1, 1), value=0.5).permute(0, 3, 1, 4, 2).flatten(2, 3)
    rows = [torch.cat(list(part), dim=1) for part in strips.split(columns) if len(part) == columns]
    picture = (torch.cat(rows) * 255).round().byte().numpy()
    image = Image.fromarray(picture)
    image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST).save(file)


def write_card(folder: Path, sheets: Path) -> None:
    """Measures the checkpoint in folder and writes its README.md; contact sheets go to sheets."""
    sampler = Sampler.load(folder)
    clean, captions = clean_clips(CLEAN_CLIPS, CLEAN_SEED)
    rebuilt = decode(sampler.pipeline.vae, encode(sampler.pipeline.vae, clean))
    contact_sheet(torch.stack([clean[:12], rebuilt[:12]], dim=1).flatten(0, 1), sheets / "reconstructions.png")
    rows = list(range(len(CAPTIONS))) * PER_CAPTION
    measured = {"renderer": shares_right(clean, captions), "after the VAE": shares_right(rebuilt, captions)}
    for guidance in (1.0, sampler.pipeline.guider.guidance_scale):
        clips = sampler.clips(rows, SAMPLE_SEED, guidance)
        measured[f"samples, guidance {guidance:g}"] = shares_right(clips, [CAPTIONS[row] for row in rows])
        contact_sheet(clips[: len(CAPTIONS) : 11], sheets / f"samples-guidance-{guidance:g}.png")
    words = list(measured["renderer"])
    lines = [f"| | {' | '.join(words)} |", f"|---|{'---|' * len(words)}"]
    lines += [
        f"| {name} | " + " | ".join(f"{shares[word]:.2f}" for word in words) + " |" for name, shares in measured.items()
    ]
    card = CARD.format(
        captions=len(CAPTIONS),
        frames=FRAMES,
        size=SIZE,
        fps=FPS,
        guidance=sampler.pipeline.guider.guidance_scale,
        shift=sampler.pipeline.scheduler.config.shift,
        wrong=WRONG,
        damaged=DAMAGED,
        psnr=psnr(clean, rebuilt),
        clean=CLEAN_CLIPS,
        samples=len(rows),
        per_caption=PER_CAPTION,
        table="\n".join(lines),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    print("\n".join(lines), f"\nreconstruction {psnr(clean, rebuilt):.2f} dB")
