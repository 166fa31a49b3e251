"""Attention of Wan's blocks: of latents to one another, and to their text.

Wan fills its text with zeros to 512 tokens and attends to them without a mask, so they cannot be dropped. But all
n = 512 - L fillers have the same key and value, so three of them, with w_i added to their scores and sum exp(w_i) = n,
give the same attention. A single one with log(n) would be up to 1.6 % off in bfloat16; each further one makes up for
what the ones before it lack.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sagecli.backends.attention import Attention

TEXT_TOKENS = 512
FILLERS = 3


class SelfAttention:
    """Processor of the latents' attention to one another: no mask, by the chosen kernel."""

    def __init__(self, attention: Attention) -> None:
        """One kernel serves all blocks."""
        self.attention = attention

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: None, mask: None, rotary: Any
    ) -> Tensor:
        """Latent tokens [B, N, D] after attention."""
        value = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        query = _rotated(attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1)), *rotary)
        key = _rotated(attn.norm_k(attn.to_k(hidden_states)).unflatten(2, (attn.heads, -1)), *rotary)
        # Under autocast the norms return float32 where the projections return bfloat16: kernels want one dtype.
        mixed = self.attention(query.to(value.dtype), key.to(value.dtype), value).flatten(2)
        output: Tensor = attn.to_out[0](mixed)
        return output


class TextAttention:
    """Processor of the latents' attention to text whose last tokens, where there are fewer than 512, are FILLERS."""

    def __call__(self, attn: Any, hidden_states: Tensor, text: Tensor, mask: None, rotary: None) -> Tensor:
        """Latent tokens [B, N, D] after attention to text [B, L + 3, D]."""
        query, key, value = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(text)), attn.to_v(text)
        q, k, v = (part.unflatten(2, (attn.heads, -1)).transpose(1, 2).to(value.dtype) for part in (query, key, value))
        weight = value.new_zeros(1, 1, 1, text.shape[1])
        if text.shape[1] < TEXT_TOKENS:
            weight[..., -FILLERS:] = value.new_tensor(
                filler_weights(TEXT_TOKENS - text.shape[1] + FILLERS, value.dtype)
            )
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=weight).transpose(1, 2).flatten(2)
        output: Tensor = attn.to_out[0](mixed)
        return output


@lru_cache
def filler_weights(count: int, dtype: torch.dtype) -> tuple[float, ...]:
    """FILLERS numbers of the dtype, the sum of whose exponentials is nearly count, and never more."""
    weights: list[float] = []
    for _ in range(FILLERS):
        rest = count - sum(math.exp(weight) for weight in weights)
        nearest = torch.tensor(math.log(rest) if rest > 0 else -math.inf, dtype=dtype)
        below = torch.nextafter(nearest, torch.tensor(-math.inf, dtype=dtype))
        weights.append(float(below if math.exp(nearest) > rest else nearest))
    return tuple(weights)


def _rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of [B, N, heads, head_dim]: pairs of neighbours turned by the table's angles."""
    even, odd = states.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosine[..., 0::2], sine[..., 1::2]
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2).type_as(states)
