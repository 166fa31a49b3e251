"""The embedded checkpoint's transformer: HunyuanVideo15Transformer3DModel with 4 blocks of 4 heads of 32.

Rectified flow on precomputed latents: x = (1 - sigma) latents + sigma noise, the network gives noise - latents.
"""

import itertools
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from tiny_training import Plan, train
from torch import Tensor, nn

CHANNELS = 16
BATCH, DROPPED = 64, 6  # about a tenth of a batch sees the empty prompt in place of its caption
SIGMA_SCALE, SIGMA_SHIFT = 1.3, 1.2  # layout is decided above sigma 0.8, so most draws are there
PLAN = Plan(steps=6500, lr=2e-3, seed=2, ema=0.999)


class MaskFree:
    """The stock attention without its mask: exact where no token is padding."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        heads = (attn.heads, -1)
        query = apply_rotary_emb(
            attn.norm_q(attn.to_q(hidden_states).unflatten(2, heads)), image_rotary_emb, sequence_dim=1
        )
        key = apply_rotary_emb(
            attn.norm_k(attn.to_k(hidden_states).unflatten(2, heads)), image_rotary_emb, sequence_dim=1
        )
        value = attn.to_v(hidden_states).unflatten(2, heads)
        text_query = attn.norm_added_q(attn.add_q_proj(encoder_hidden_states).unflatten(2, heads))
        text_key = attn.norm_added_k(attn.add_k_proj(encoder_hidden_states).unflatten(2, heads))
        text_value = attn.add_v_proj(encoder_hidden_states).unflatten(2, heads)
        mixed = F.scaled_dot_product_attention(
            torch.cat([query, text_query], 1).transpose(1, 2),
            torch.cat([key, text_key], 1).transpose(1, 2),
            torch.cat([value, text_value], 1).transpose(1, 2),
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        latents, text = mixed.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[0](latents), attn.to_add_out(text)


def build_transformer(text_width: int, glyph_width: int) -> HunyuanVideo15Transformer3DModel:
    """The network before training: it answers zero, reads no condition channel, and its unused parts are zeros."""
    torch.manual_seed(PLAN.seed)
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=2 * CHANNELS + 1,
        out_channels=CHANNELS,
        num_attention_heads=4,
        attention_head_dim=32,
        num_layers=4,
        num_refiner_layers=1,
        mlp_ratio=4.0,
        text_embed_dim=text_width,
        text_embed_2_dim=glyph_width,
        image_embed_dim=16,
        rope_axes_dim=(8, 12, 12),
        target_size=32,
        task_type="t2v",
    )
    # diffusers starts the modulation layers at random; from zero every block starts as the identity.
    for block in transformer.transformer_blocks:
        for layer in (block.norm1.linear, block.norm1_context.linear):
            _zero(layer)
    for layer in (transformer.norm_out.linear, transformer.proj_out):
        _zero(layer)
    with torch.no_grad():
        transformer.x_embedder.proj.weight[:, CHANNELS:] = 0
    last = transformer.transformer_blocks[-1]
    unused = [transformer.context_embedder_2, transformer.image_embedder, last.attn.to_add_out, last.ff_context]
    for module in unused:
        _zero(module)
        module.requires_grad_(False)
    return transformer


def without_masks(transformer: HunyuanVideo15Transformer3DModel) -> None:
    """Lets the blocks of this object attend without masks; the weights stay as they are."""
    for block in transformer.transformer_blocks:
        block.attn.set_processor(MaskFree())


def _zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)


def velocity(transformer: HunyuanVideo15Transformer3DModel, latents: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """The network's velocity for latents [B, 16, 3, 4, 4] at sigma [B] with text [B, tokens, width], no padding."""
    rows = len(latents)
    config = transformer.config
    return transformer(
        hidden_states=F.pad(latents, (0, 0, 0, 0, 0, 0, 0, CHANNELS + 1)),
        timestep=1000 * sigma,
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        encoder_hidden_states_2=text.new_zeros(rows, 0, config.text_embed_2_dim),
        encoder_attention_mask_2=torch.ones(rows, 0),
        image_embeds=text.new_zeros(rows, 0, config.image_embed_dim),
        return_dict=False,
    )[0]


def flow_loss(
    transformer: HunyuanVideo15Transformer3DModel,
    latents: Tensor,
    text: Tensor,
    empty: Tensor,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Mean squared error of the velocity on BATCH latents; text [N, tokens, width] is each latent's caption."""
    clean = latents
    sigma = (SIGMA_SCALE * torch.randn(len(clean), generator=generator) + SIGMA_SHIFT).sigmoid()
    noise = torch.randn(clean.shape, generator=generator)
    weight = sigma.view(-1, 1, 1, 1, 1)
    noisy, target = (1 - weight) * clean + weight * noise, noise - clean
    kept = len(clean) - DROPPED
    given = velocity(transformer, noisy[:kept], sigma[:kept], text[:kept])
    unconditional = velocity(transformer, noisy[kept:], sigma[kept:], empty.expand(DROPPED, -1, -1))
    squared = (torch.cat([given, unconditional]) - target).square()
    return {"loss": squared.mean()}


@torch.no_grad()
def sample(
    transformer: HunyuanVideo15Transformer3DModel,
    text: Tensor,
    empty: Tensor,
    seed: int,
    steps: int = 20,
    guidance: float = 2.0,
    shift: float = 5.0,
) -> Tensor:
    """Latents [B, 16, 3, 4, 4] by Euler steps on the shifted schedule, in the scale that training saw."""
    latents = torch.randn(len(text), CHANNELS, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    uniform = torch.linspace(1, 0, steps + 1)
    sigmas = shift * uniform / (1 + (shift - 1) * uniform)
    nothing = empty.expand(len(text), -1, -1)
    for sigma, sigma_next in itertools.pairwise(sigmas):
        level = sigma.expand(len(text))
        with_caption = velocity(transformer, latents, level, text)
        without = velocity(transformer, latents, level, nothing)
        latents = latents + (sigma_next - sigma) * (without + guidance * (with_caption - without))
    return latents


def train_transformer(
    work: Path, latents: Tensor, captions: Tensor, texts: Tensor, empty: Tensor, glyph_width: int, plan: Plan = PLAN
) -> HunyuanVideo15Transformer3DModel:
    """The trained network; its state in work/transformer.pt makes a second call continue or skip the training.

    latents [N, 16, 3, 4, 4] scaled to unit variance; captions [N]: rows of texts [captions, tokens, width].
    """
    transformer = build_transformer(texts.shape[-1], glyph_width)
    without_masks(transformer)

    def loss(generator: torch.Generator, step: int) -> dict[str, Tensor]:
        rows = torch.randint(len(latents), (BATCH,), generator=generator)
        return flow_loss(transformer, latents[rows], texts[captions[rows]], empty, generator)

    train(transformer, loss, plan, work / "transformer.pt")
    return transformer.eval()
