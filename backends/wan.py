"""Wan 2.1 text to video, and Wan 2.2 TI2V-5B, which its class serves too (diffusers' WanPipeline).

The transformer sees sigma as timestep = 1000 * sigma. Its text is filled to 512 tokens, which wan_attention.py takes
care of. Latents are normalised by the VAE's own mean and std of each channel. TI2V-5B's timestep for every token is,
for text to video, one timestep: the same model call.
"""

from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from torch import Tensor, nn
from transformers import AutoTokenizer, UMT5EncoderModel
from transformers.utils.logging import disable_progress_bar

from sagecli.backends import VideoSize, weights
from sagecli.backends.attention import Attention
from sagecli.backends.trained import choose_trained
from sagecli.backends.wan_attention import FILLERS, TEXT_TOKENS, SelfAttention, TextAttention
from sagecli.backends.weights import load, locate
from sagecli.engine.noise import gaussian
from sagecli.errors import UserError

if TYPE_CHECKING:
    from sagecli.config import ModelConfig

PIPELINE = "WanPipeline"
ATTENTION = r"attn[12]\.(to_q|to_k|to_v|to_out\.0)"
LORA_TARGETS = {
    "attention": rf"blocks\.\d+\.{ATTENTION}",
    "attention+mlp": rf"blocks\.\d+\.({ATTENTION}|ffn\.net\.(0\.proj|2))",
}


class Wan:
    """Wan as a Backbone.

    dtype "bfloat16": the transformer runs under autocast and the text encoder in bfloat16; the VAE stays in float32, as
    its authors run it. What trains is kept in float32. Latents and velocities are float32 in any case.
    """

    module: nn.Module

    def __init__(self, model: "ModelConfig", device: torch.device) -> None:
        """Load the transformer and the VAE onto the device; the text encoder waits for the first encode.

        Raises UserError for weights, an attention kernel or LoRA targets that are not there, and for models that Wan
        guides by images or splits in two.
        """
        disable_progress_bar()  # transformers would print one for each part
        self._folder = locate(model.path, PIPELINE)
        self._device = device
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        self._vae = load(AutoencoderKLWan, self._folder / "vae", torch.float32).to(device)
        self._vae.requires_grad_(False)
        self._vae.enable_slicing()
        if model.vae_tiling:
            self._vae.enable_tiling()
        stored = torch.float32 if model.train == "full" else self._dtype
        transformer = load(WanTransformer3DModel, self._folder / "transformer", stored)
        self._refuse_others(transformer.config)
        self._patch: int = transformer.config.patch_size[1]
        attention = Attention(model.attention, device, self._dtype, transformer.config.attention_head_dim)
        for block in transformer.blocks:
            block.attn1.set_processor(SelfAttention(attention))
            block.attn2.set_processor(TextAttention())
        choose_trained(transformer, model, LORA_TARGETS, dead=None)
        if model.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        self.module = transformer.to(device)
        self._text: Any = None  # the stock pipeline's text half, while it is loaded
        self._encoded: dict[str, Tensor] = {}

    def _refuse_others(self, config: Any) -> None:
        if (self._folder / "transformer_2" / "config.json").is_file():
            raise UserError(f"{self._folder} splits its steps over two transformers, of which none trains here")
        if config.image_dim is not None or config.in_channels != self._vae.config.z_dim:
            raise UserError(f"{self._folder} is guided by images; it takes a text-to-video Wan")

    @classmethod
    def weight_bytes(cls, path: str) -> int:
        """Size of the transformer's weight files; UserError for what is missing of the model."""
        return weights.transformer_bytes(path, PIPELINE)

    @classmethod
    def check_size(cls, path: str, size: VideoSize) -> None:
        """UserError, naming the nearest sizes, for one that the VAE's and the patches' ratios do not divide."""
        vae, transformer = (weights.part_config(path, part, PIPELINE) for part in ("vae", "transformer"))
        space = vae["scale_factor_spatial"] * transformer["patch_size"][1]
        weights.check_ratios(size, space, vae["scale_factor_temporal"])

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> dict[str, Tensor]:
        """Conditioning [1, L + 3, D] of every prompt: its L real tokens, at most 3 fillers; each is encoded once.

        The empty prompt is encoded along, for guidance; see free_text_encoders.
        """
        for prompt in ["", *prompts]:
            if prompt not in self._encoded:
                self._encoded[prompt] = self._encode_one(prompt).cpu()
        self._empty = self._encoded[""].to(self._device)
        return {prompt: self._encoded[prompt].to(self._device) for prompt in prompts}

    def free_text_encoders(self) -> None:
        """Drop the text encoder from memory; a prompt that is new after that loads it again."""
        self._text = None

    def _encode_one(self, prompt: str) -> Tensor:
        if self._text is None:
            encoder = load(UMT5EncoderModel, self._folder / "text_encoder", self._dtype)
            tokenizer = AutoTokenizer.from_pretrained(self._folder / "tokenizer")
            self._text = WanPipeline(tokenizer, encoder.to(self._device), self._vae, scheduler=None)
        text: Tensor = self._text.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS, device=self._device
        )[0]
        length = int(text[0].ne(0).any(-1).sum())  # fillers are exactly zero
        if length == TEXT_TOKENS:
            raise UserError(f"the prompt {prompt[:40]!r}... has {TEXT_TOKENS} tokens or more; shorten it")
        return text[:, : length + FILLERS]

    def initial_latents(self, seeds: list[int], size: VideoSize) -> Tensor:
        """Standard normal latents [B, C, F', H', W'] float32 on the device, one per seed (noise stream 0)."""
        config = self._vae.config
        weights.check_ratios(size, config.scale_factor_spatial * self._patch, config.scale_factor_temporal)
        frames = (size.frames - 1) // config.scale_factor_temporal + 1
        sides = (size.height // config.scale_factor_spatial, size.width // config.scale_factor_spatial)
        return torch.stack([gaussian(seed, 0, (config.z_dim, frames, *sides)) for seed in seeds]).to(self._device)

    def velocity(self, latents: Tensor, sigma: float, conditioning: Tensor, guidance: float) -> Tensor:
        """In the latents' shape and dtype; guidance 1 is one forward, else empty + guidance * (prompt - empty)."""
        conditional = self._forward(latents, sigma, conditioning)
        if guidance == 1.0:
            return conditional
        unconditional = self._forward(latents, sigma, self._empty)
        return unconditional + guidance * (conditional - unconditional)

    def _forward(self, latents: Tensor, sigma: float, conditioning: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            velocity: Tensor = self.module(
                hidden_states=latents,
                timestep=latents.new_full((len(latents),), 1000 * sigma),
                encoder_hidden_states=conditioning.expand(len(latents), -1, -1),
                return_dict=False,
            )[0]
        return velocity.to(latents.dtype)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Videos [B, F, 3, H, W] float32 in [0, 1] of clean latents [B, C, F', H', W']."""
        mean, std = (
            latents.new_tensor(values).view(1, -1, 1, 1, 1)
            for values in (self._vae.config.latents_mean, self._vae.config.latents_std)
        )
        videos: Tensor = self._vae.decode(latents * std + mean).sample
        return (videos / 2 + 0.5).clamp(0, 1).permute(0, 2, 1, 3, 4)
