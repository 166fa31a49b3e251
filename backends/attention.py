"""Attention without a mask through one of diffusers' kernels, checked before a run starts."""

from typing import Any

import torch
from diffusers.models import attention_dispatch as kernels
from diffusers.models.embeddings import apply_rotary_emb
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from torch import Tensor

from sagecli.errors import UserError, did_you_mean

# The first word that a kernel's name contains says how to get it; the names without one come with torch.
INSTALL = {
    "_hub": "pip install 'kernels>=0.12'",
    "_3": "pip install --no-build-isolation 'git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper'",
    "flash": "pip install --no-build-isolation flash-attn",
    "sage": "pip install --no-build-isolation git+https://github.com/thu-ml/SageAttention.git",
    "xformers": "pip install xformers",
    "npu": "pip install torch_npu",
    "xla": "pip install torch_xla",
}


class Attention:
    """Softmax attention over [B, S, heads, head_dim], every token to every token, by the kernel of that name."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        """Find the kernel and try it once; raises UserError where it is unknown, not installed, or fails here."""
        known = [kernel.value for kernel in kernels.AttentionBackendName]
        if name not in known:
            raise UserError(
                f"model.attention = {name!r} is unknown{did_you_mean(name, known)}; known: {', '.join(known)}"
            )
        self.kernel = kernels.AttentionBackendName(name)
        try:
            kernels._check_attention_backend_requirements(self.kernel)
        except RuntimeError as error:
            command = next(command for word, command in INSTALL.items() if word in name)
            raise UserError(
                f"model.attention = {name!r} is not installed: get it by `{command}`, or use 'native'"
            ) from error
        probe = torch.zeros(1, 16, 1, head_dim, device=device, dtype=dtype, requires_grad=True)
        try:
            kernels._maybe_download_kernel_for_backend(self.kernel)  # only names with _hub ask the network
            output = kernels.dispatch_attention_fn(probe, probe, probe, backend=self.kernel)
        except (RuntimeError, ValueError, TypeError, ImportError, AssertionError, OSError, HTTPError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"model.attention = {name!r} does not run on {device.type} in {dtype}: {reason}; use 'native'"
            ) from error
        self.trains = _has_backward(output, probe)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, S, heads, head_dim] of the same three; raises UserError where a gradient is due that it cannot give."""
        if torch.is_grad_enabled() and query.requires_grad and not self.trains:
            # Without this, sage would train on: its output is silently cut off from the graph.
            raise UserError(f"model.attention = {self.kernel.value!r} has no backward pass: use it for rollouts only")
        output: Tensor = kernels.dispatch_attention_fn(query, key, value, backend=self.kernel)
        return output


class JointAttention:
    """Processor of HunyuanVideo's blocks: latents and text attend to one another, and no token is padding."""

    def __init__(self, attention: Attention) -> None:
        """One kernel serves all blocks."""
        self.attention = attention

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Latent tokens [B, N, D] and text tokens [B, L, D] after attention; the mask is all True and not read."""
        heads = (attn.heads, -1)
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(2, heads))
        key = attn.norm_k(attn.to_k(hidden_states).unflatten(2, heads))
        query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
        key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        text_query = attn.norm_added_q(attn.add_q_proj(encoder_hidden_states).unflatten(2, heads))
        text_key = attn.norm_added_k(attn.add_k_proj(encoder_hidden_states).unflatten(2, heads))
        text_value = attn.add_v_proj(encoder_hidden_states).unflatten(2, heads)
        value = attn.to_v(hidden_states).unflatten(2, heads)
        # Under autocast the norms return float32 where the projections return bfloat16: kernels want one dtype.
        latents = query.to(value.dtype), key.to(value.dtype), value
        text = text_query.to(value.dtype), text_key.to(value.dtype), text_value
        mixed, mixed_text = self.mix(latents, text)
        return attn.to_out[0](mixed.flatten(2)), attn.to_add_out(mixed_text.flatten(2))

    def mix(self, latents: tuple[Tensor, ...], text: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Attention of queries, keys and values [B, N, heads, head_dim] of latents and [B, L, ...] of text."""
        mixed = self.attention(*(torch.cat(pair, dim=1) for pair in zip(latents, text, strict=True)))
        count = latents[0].shape[1]
        return mixed[:, :count], mixed[:, count:]


def _has_backward(output: Tensor, probe: Tensor) -> bool:
    try:
        torch.autograd.grad(output.sum(), probe)
    except RuntimeError:
        return False
    return True
