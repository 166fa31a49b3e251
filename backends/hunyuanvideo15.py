"""HunyuanVideo-1.5 (diffusers' HunyuanVideo15Pipeline), text to video, without padding.

The transformer sees sigma as timestep = 1000 * sigma and its input is cat[latents C, zeros C, zeros 1]: the condition
and mask channels of image-to-video are zero. The stock pipeline pads text to 1000 + 256 + 729 tokens and masks them;
here each prompt keeps its real tokens, all samples of a batch share one prompt, and attention has no mask: the same
velocity, many times faster, and flash kernels (which take no mask) become possible.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline, HunyuanVideo15Transformer3DModel
from torch import Tensor, nn
from transformers import ByT5Tokenizer, Qwen2_5_VLTextModel, Qwen2Tokenizer, T5EncoderModel
from transformers.utils.logging import disable_progress_bar

from sagecli.backends import VideoSize, weights
from sagecli.backends.attention import Attention, JointAttention
from sagecli.backends.trained import choose_trained
from sagecli.backends.weights import load, locate
from sagecli.engine.noise import gaussian
from sagecli.errors import UserError

if TYPE_CHECKING:
    from sagecli.config import ModelConfig

ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj)"
FEED_FORWARD = r"(ff|ff_context)\.net\.(0\.proj|2)"
# A prefix is part of the pattern because plain suffixes would hit the token refiner too.
LORA_TARGETS = {
    "attention": rf"transformer_blocks\.\d+\.{ATTENTION}",
    "attention+mlp": rf"transformer_blocks\.\d+\.({ATTENTION}|{FEED_FORWARD})",
}


@dataclass(frozen=True)
class Conditioning:
    """A prompt as the transformer takes it."""

    text: Tensor
    """[1, L, D]: Qwen's hidden states of the L real tokens."""
    glyphs: Tensor
    """[1, G, D2]: ByT5's hidden states of the text in quotes; G = 0 without any."""

    def to(self, device: torch.device) -> "Conditioning":
        """The same on another device."""
        return Conditioning(self.text.to(device), self.glyphs.to(device))


class HunyuanVideo15:
    """HunyuanVideo-1.5 as a Backbone.

    dtype "float32": everything in float32. dtype "bfloat16": the transformer runs under autocast, the text encoders
    and the VAE in bfloat16; what trains is kept in float32 (all weights with train = "full", the adapter with "lora"),
    what is frozen in bfloat16. Latents and velocities are float32 in any case.
    """

    module: nn.Module

    def __init__(self, model: "ModelConfig", device: torch.device) -> None:
        """Load the transformer and the VAE onto the device; the text encoders wait for the first encode.

        Raises UserError for weights, an attention kernel or LoRA targets that are not there.
        """
        disable_progress_bar()  # transformers would print one for each part
        self._folder = locate(model.path)
        self._device = device
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        self._vae = load(AutoencoderKLHunyuanVideo15, self._folder / "vae", self._dtype).to(device)
        self._vae.requires_grad_(False)
        self._vae.enable_slicing()  # a batch of several fails in the VAE's own attention mask
        if model.vae_tiling:
            self._vae.enable_tiling()
        stored = torch.float32 if model.train == "full" else self._dtype
        transformer = load(HunyuanVideo15Transformer3DModel, self._folder / "transformer", stored)
        config = transformer.config
        attention = Attention(model.attention, device, self._dtype, config.attention_head_dim)
        self._image_width = config.image_embed_dim
        for block in transformer.transformer_blocks:
            block.attn.set_processor(JointAttention(attention))
        choose_trained(transformer, model, LORA_TARGETS, _dead_parameters(len(transformer.transformer_blocks) - 1))
        if model.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        self.module = transformer.to(device)
        self._text: Any = None  # the stock pipeline's text half, while it is loaded
        self._encoded: dict[str, Conditioning] = {}

    @classmethod
    def weight_bytes(cls, path: str) -> int:
        """Size of the transformer's weight files; UserError for what is missing of the model."""
        return weights.transformer_bytes(path)

    @classmethod
    def check_size(cls, path: str, size: VideoSize) -> None:
        """UserError, naming the nearest sizes, for one that the ratios of the model's VAE do not divide."""
        weights.check_size(path, size)

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> dict[str, Conditioning]:
        """Conditioning of every prompt, on the device; each is encoded once and kept on the CPU.

        The empty prompt is encoded along, for guidance. The text encoders stay until free_text_encoders; a prompt that
        is new after that loads them again, so encode all prompts of a run first.
        """
        for prompt in ["", *prompts]:
            if prompt not in self._encoded:
                self._encoded[prompt] = self._encode_one(prompt).to(torch.device("cpu"))
        self._empty = self._encoded[""].to(self._device)
        return {prompt: self._encoded[prompt].to(self._device) for prompt in prompts}

    def free_text_encoders(self) -> None:
        """Drop the text encoders from memory; prompts encoded so far stay."""
        self._text = None

    def _encode_one(self, prompt: str) -> Conditioning:
        if self._text is None:
            encoder = load(Qwen2_5_VLTextModel, self._folder / "text_encoder", self._dtype)
            glyph_encoder = load(T5EncoderModel, self._folder / "text_encoder_2", self._dtype)
            self._text = HunyuanVideo15Pipeline(
                text_encoder=encoder.to(self._device),
                tokenizer=Qwen2Tokenizer.from_pretrained(self._folder / "tokenizer"),
                text_encoder_2=glyph_encoder.to(self._device),
                tokenizer_2=ByT5Tokenizer.from_pretrained(self._folder / "tokenizer_2"),
                vae=self._vae,
                transformer=None,
                scheduler=None,
                guider=None,
            )
        text, text_mask, glyphs, glyph_mask = self._text.encode_prompt(prompt, self._device, self._dtype)
        if text_mask.all() or glyph_mask.all():
            limits = f"{text_mask.shape[1]} tokens, {glyph_mask.shape[1]} of them in quotes"
            raise UserError(
                f"the prompt {prompt[:40]!r}... is longer than the text encoders take ({limits}); shorten it"
            )
        return Conditioning(text[:, text_mask[0].bool()], glyphs[:, glyph_mask[0].bool()])

    def initial_latents(self, seeds: list[int], size: VideoSize) -> Tensor:
        """Standard normal latents [B, C, F', H', W'] float32 on the device, one per seed (noise stream 0)."""
        space, time = self._vae.spatial_compression_ratio, self._vae.temporal_compression_ratio
        weights.check_ratios(size, space, time)
        frames = (size.frames - 1) // time + 1
        shape = (self._vae.config.latent_channels, frames, size.height // space, size.width // space)
        return torch.stack([gaussian(seed, 0, shape) for seed in seeds]).to(self._device)

    def velocity(self, latents: Tensor, sigma: float, conditioning: Conditioning, guidance: float) -> Tensor:
        """In the latents' shape and dtype; guidance 1 is one forward, else empty + guidance * (prompt - empty)."""
        conditional = self._forward(latents, sigma, conditioning)
        if guidance == 1.0:
            return conditional
        unconditional = self._forward(latents, sigma, self._empty)
        return unconditional + guidance * (conditional - unconditional)

    def _forward(self, latents: Tensor, sigma: float, conditioning: Conditioning) -> Tensor:
        batch, channels = latents.shape[:2]
        text = conditioning.text.expand(batch, -1, -1)
        glyphs = conditioning.glyphs.expand(batch, -1, -1)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            velocity: Tensor = self.module(
                hidden_states=torch.cat([latents, latents.new_zeros(batch, channels + 1, *latents.shape[2:])], dim=1),
                timestep=latents.new_full((batch,), 1000 * sigma),
                encoder_hidden_states=text,
                encoder_attention_mask=text.new_ones(text.shape[:2], dtype=torch.bool),
                encoder_hidden_states_2=glyphs,
                encoder_attention_mask_2=text.new_ones(glyphs.shape[:2], dtype=torch.bool),
                image_embeds=text.new_zeros(batch, 0, self._image_width),
                return_dict=False,
            )[0]
        return velocity.to(latents.dtype)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Videos [B, F, 3, H, W] float32 in [0, 1] of clean latents [B, C, F', H', W']."""
        scaled = latents.to(self._dtype) / self._vae.config.scaling_factor
        videos: Tensor = self._vae.decode(scaled).sample.float()
        return (videos / 2 + 0.5).clamp(0, 1).permute(0, 2, 1, 3, 4)


def _dead_parameters(last: int) -> str:
    """Pattern of what text to video never uses: image embedder, second timestep, the last block's text output."""
    text_output = rf"transformer_blocks\.{last}\.(ff_context|attn\.(add_q_proj|norm_added_q|to_add_out))"
    return rf"({text_output}|image_embedder|time_embed\.timestep_embedder_r)(\..*)?"
