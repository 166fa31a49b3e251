"""One video's tokens shared by several processes (Ulysses), for HunyuanVideo-1.5, by diffusers' context parallel.

Each process keeps a run of the latents' tokens, which diffusers' hooks split, and all of the text. Within
attention tokens are exchanged for heads: each process attends from all tokens to all tokens with its share of the
heads. What the processes pass to a loss is the same on all, and counts once; so each parameter's gradient is the SUM
over the processes. Source: arXiv 2309.14509; the text is not split because it is short and of any length.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ContextParallelInput
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from sagecli.backends.attention import Attention, JointAttention
from sagecli.errors import UserError

_OWN = {"split_output": True}
PLAN: dict[str, Any] = {
    "x_embedder": {0: ContextParallelInput(split_dim=1, expected_dims=3, **_OWN)},
    "rope": {index: ContextParallelInput(split_dim=0, expected_dims=2, **_OWN) for index in (0, 1)},
}
"""Where diffusers splits. It gathers nothing: runs of unequal length, as it gathers them, are refused by gloo."""


def split_sequence(transformer: Any, processes: int, device: torch.device) -> None:
    """Let every `processes` neighbouring processes share the tokens of what they all are given, and all get the whole.

    UserError for another transformer and for heads that do not divide; in a call, for fewer tokens than processes.
    """
    if not isinstance(transformer, HunyuanVideo15Transformer3DModel):
        raise UserError("parallel.sequence is there for HunyuanVideo-1.5 alone; set it to 1")
    heads = transformer.config.num_attention_heads
    if heads % processes:
        raise UserError(f"parallel.sequence = {processes} does not divide the model's {heads} attention heads")
    shape = (dist.get_world_size() // processes, 1, processes)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "ring", "ulysses"))["ring", "ulysses"]
    config = ContextParallelConfig(ulysses_degree=processes, ulysses_anything=True, mesh=mesh)
    config.setup(dist.get_rank(), dist.get_world_size(), device, mesh)
    apply_context_parallel(transformer, config, PLAN)
    shared = Shared(mesh["ulysses"].get_group())
    patch = transformer.config.patch_size_t * transformer.config.patch_size**2

    def measure(module: Any, given: Any, named: dict[str, Any]) -> None:
        shared.tokens = math.prod(named["hidden_states"].shape[2:]) // patch
        if shared.tokens < processes:
            raise UserError(f"a video of {shared.tokens} tokens cannot be shared by parallel.sequence = {processes}")

    transformer.register_forward_pre_hook(measure, with_kwargs=True)
    transformer.proj_out.register_forward_hook(lambda module, given, output: _applied(_GatherTokens, output, shared))
    for block in transformer.transformer_blocks:
        block.attn.set_processor(SplitAttention(block.attn.processor.attention, shared))


class Shared:
    """The processes that share the tokens, and how many tokens the video at hand has."""

    def __init__(self, group: Any) -> None:
        """group: of torch.distributed."""
        self.group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.tokens = 0

    @property
    def sizes(self) -> list[int]:
        """How many tokens each has: as equal runs as can be, the longer ones first, as diffusers splits."""
        share, more = divmod(self.tokens, self.count)
        return [share + (rank < more) for rank in range(self.count)]


class SplitAttention(JointAttention):
    """JointAttention of a process's own latent tokens and the whole text, with its share of the heads."""

    def __init__(self, attention: Attention, shared: Shared) -> None:
        """One kernel serves all blocks."""
        super().__init__(attention)
        self.shared = shared

    def mix(self, latents: tuple[Tensor, ...], text: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """[B, n, heads, head_dim] of own latent tokens and [B, L, heads, head_dim] of text after attention."""
        shared = self.shared
        joined = [
            torch.cat([_applied(_Exchange, one, shared, True), words.chunk(shared.count, 2)[shared.rank]], 1)
            for one, words in zip(latents, text, strict=True)
        ]
        mixed = self.attention(*joined)
        own = _applied(_Exchange, mixed[:, : shared.tokens], shared, False)
        return own, _applied(_GatherHeads, mixed[:, shared.tokens :], shared.group)


def _applied(function: Any, *arguments: Any) -> Tensor:
    """What an autograd function gives; torch has no types for it."""
    output: Tensor = function.apply(*arguments)
    return output


class _Exchange(torch.autograd.Function):
    """Own tokens with all heads for all tokens with own heads, or back; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, shared: Shared, to_heads: bool) -> Tensor:
        ctx.how = shared, to_heads
        return _exchange(given, shared, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shared, to_heads = ctx.how
        return _exchange(gradient, shared, not to_heads), None, None


def _exchange(given: Tensor, shared: Shared, to_heads: bool) -> Tensor:
    """[B, n, H, D] -> [B, N, H / P, D] where to_heads, else the reverse."""
    rank, sizes, group = shared.rank, shared.sizes, shared.group
    sent = given.chunk(shared.count, 2) if to_heads else given.split(sizes, 1)
    batch, _, heads, width = sent[0].shape
    shapes = [(batch, size if to_heads else sizes[rank], heads, width) for size in sizes]
    lengths, wanted = [part.numel() for part in sent], [math.prod(shape) for shape in shapes]
    flat = given.new_empty(sum(wanted))
    source = torch.cat([part.reshape(-1) for part in sent])
    dist.all_to_all_single(flat, source, wanted, lengths, group=group)
    received = [piece.view(shape) for piece, shape in zip(flat.split(wanted), shapes, strict=True)]
    return torch.cat(received, 1 if to_heads else 2)


class _GatherTokens(torch.autograd.Function):
    """[B, n, C] -> [B, N, C]; what all compute of it counts once, so its gradient is each process's own run."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, shared: Shared) -> Tensor:
        ctx.sizes, ctx.rank = shared.sizes, shared.rank
        padded = given.new_zeros(given.shape[0], max(ctx.sizes), given.shape[2])
        padded[:, : given.shape[1]] = given
        found = [torch.empty_like(padded) for _ in ctx.sizes]
        dist.all_gather(found, padded, group=shared.group)
        return torch.cat([one[:, :size] for one, size in zip(found, ctx.sizes, strict=True)], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.split(ctx.sizes, 1)[ctx.rank], None


class _GatherHeads(torch.autograd.Function):
    """[B, L, H / P, D] -> [B, L, H, D]; every process uses all of it, so its gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, group: Any) -> Tensor:
        ctx.group = group
        found = [torch.empty_like(given) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, given.contiguous(), group=group)
        return torch.cat(found, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group), 2)[dist.get_rank(ctx.group)], None
