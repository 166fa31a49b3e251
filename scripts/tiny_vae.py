"""The embedded checkpoint's VAE: 9x32x32 pixels to 16x3x4x4 latents, in AutoencoderKLHunyuanVideo15's own format.

Trained as a deterministic autoencoder whose latents carry fixed noise, which keeps them smooth; a reparametrised
KL made the log-variance explode.
"""

import functools
import math
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
    HunyuanVideo15AttnBlock,
    HunyuanVideo15RMS_norm,
)
from tiny_data import dataset
from tiny_training import Plan, train
from torch import Tensor, nn

from sagecli.rewards.shapes import BACKGROUND

LATENT_NOISE = 0.1
LATENT_PENALTY = 5e-4
SHAPE_WEIGHT = 5.0  # the shape covers a twentieth to an eighth of the frame
CLIPS, BATCH = 8192, 16
PLAN = Plan(steps=2600, lr=4e-3, seed=1, ema=0.995)


def build_vae() -> AutoencoderKLHunyuanVideo15:
    torch.manual_seed(PLAN.seed)
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=16,
        block_out_channels=(16, 16, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )
    take_batches(vae)
    return vae


def take_batches(vae: nn.Module) -> None:
    """Lets this VAE object encode and decode several clips at once, and faster; the weights stay as they are."""
    for module in vae.modules():
        if isinstance(module, HunyuanVideo15RMS_norm):
            module.forward = functools.partial(_rms_norm, module)
        if isinstance(module, HunyuanVideo15AttnBlock):
            module.prepare_causal_attention_mask = _causal_mask


def _rms_norm(norm: HunyuanVideo15RMS_norm, x: Tensor) -> Tensor:
    # The library's own reduces with a slow kernel that takes a quarter of a training step.
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-12) * norm.gamma


def _causal_mask(frames: int, area: int, dtype: torch.dtype, device: torch.device, batch_size: int = 1) -> Tensor:
    # The library's own puts the batch where attention has its heads, so it fails for more than one clip.
    frame = torch.arange(frames * area, device=device) // area
    hidden = frame[None, :] > frame[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, float("-inf"))


def pixels(clips: Tensor) -> Tensor:
    """Clips [B, F, 3, H, W], uint8 or in [0, 1], as the VAE takes them: [B, 3, F, H, W] in [-1, 1]."""
    values = clips.float() / 255 if clips.dtype == torch.uint8 else clips
    return (values.movedim(2, 1) * 2 - 1).contiguous(memory_format=torch.channels_last_3d)


@torch.no_grad()
def encode(vae: AutoencoderKLHunyuanVideo15, clips: Tensor) -> Tensor:
    """Unscaled latents [B, 16, 3, 4, 4]."""
    return torch.cat([vae.encode(pixels(part)).latent_dist.mode() for part in clips.split(64)]).contiguous()


@torch.no_grad()
def decode(vae: AutoencoderKLHunyuanVideo15, latents: Tensor) -> Tensor:
    """Clips [B, F, 3, H, W] in [0, 1] of unscaled latents."""
    parts = [vae.decode(part).sample for part in latents.split(64)]
    return (torch.cat(parts).movedim(1, 2) / 2 + 0.5).clamp(0, 1)


def psnr(clips: Tensor, others: Tensor) -> float:
    """Mean over clips of the peak signal-to-noise ratio in dB."""
    return float((-10 * (clips - others).square().flatten(1).mean(1).log10()).mean())


def reconstruction_loss(vae: AutoencoderKLHunyuanVideo15, clips: Tensor, generator: torch.Generator) -> dict:
    rows = torch.randint(len(clips), (BATCH,), generator=generator)
    target = pixels(clips[rows])
    mean, log_variance = vae.encoder(target).chunk(2, dim=1)
    noise = LATENT_NOISE * torch.randn(mean.shape, generator=generator)
    error = vae.decoder(mean + noise) - target
    background = torch.tensor(BACKGROUND).view(1, 3, 1, 1, 1) * 2 - 1
    shape = ((target - background).abs().amax(1, keepdim=True) / 0.3).clamp(max=1)
    weight = 1 + SHAPE_WEIGHT * shape
    squared = (weight * error.square()).mean()
    absolute = (weight * error.abs()).mean()
    # The variance head is unused in training; it learns to state the noise that the decoder is used to.
    stated = (log_variance - 2 * math.log(LATENT_NOISE)).square().mean()
    loss = squared + 0.02 * absolute + LATENT_PENALTY * mean.square().mean() + 1e-4 * stated
    return {"loss": loss, "mse": error.detach().square().mean(), "std": mean.detach().std()}


def train_vae(work: Path, plan: Plan = PLAN) -> AutoencoderKLHunyuanVideo15:
    """The trained VAE; its state in work/vae.pt makes a second call continue or skip the training."""
    vae = build_vae()
    clips, _ = dataset(CLIPS, plan.seed)
    train(vae, lambda generator, step: reconstruction_loss(vae, clips, generator), plan, work / "vae.pt")
    return vae.eval()
