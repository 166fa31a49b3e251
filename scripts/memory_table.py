"""What each process of a run holds and sends, computed from a preset and the model's shapes; docs/scaling.md explains.

python scripts/memory_table.py prints that page's table; python scripts/memory_table.py PRESET PROCESSES [KEY=VALUE ...]
one column of your own. HunyuanVideo-1.5 only. GB are 10^9 bytes. Nothing here is measured on a GPU.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel

from sagecli.backends.hunyuanvideo15 import LORA_TARGETS, _dead_parameters
from sagecli.backends.trained import choose_trained
from sagecli.config import Config, ModelConfig
from sagecli.engine.rollout import round_sampling
from sagecli.engine.trust_region import POSITION, VELOCITY
from sagecli.loading import load_config

SPLIT = ("parallel.shard=true", "train.diagnose_every=0")
CASES = [
    ("(a) LoRA, 1 GPU", "setting-b-lora", 1, ()),
    ("LoRA, 8 GPUs", "setting-b-lora", 8, ()),
    ("(b) full, 8 GPUs", "setting-b", 8, SPLIT),
    ("(c) full, 64 GPUs", "setting-b", 64, (*SPLIT, "parallel.sequence=2")),
]
TEXT_ENCODERS, VAE = 7_070_619_136 + 219_314_944, 1_260_634_115  # parameters; the former: Qwen2.5-VL 7B, ByT5-small
VIDEOALIGN = 5_031_072_529 // 2  # parameters at most: half the bytes of the released file
TOKENS, WIDTHS = (1000, 256), (3584, 1472)  # of the longest prompt that the two text encoders take
BLOCK = 100  # bytes a token and channel, while a block is recomputed and differentiated: an estimate
DECODE = 7  # of the decoder's largest tensors at once (tests/test_memory_table.py follows it)


def transformer(model: ModelConfig, settings: dict[str, Any]) -> Any:
    """The one with this config.json ({}: the released one's numbers) and what trains of it chosen, without data."""
    with torch.device("meta"):
        module: Any = HunyuanVideo15Transformer3DModel.from_config(settings)
        choose_trained(module, model, LORA_TARGETS, _dead_parameters(len(module.transformer_blocks) - 1))
    return module


def size(parameters: Iterable[torch.nn.Parameter]) -> int:
    """How many numbers they hold."""
    return sum(parameter.numel() for parameter in parameters)


def column(config: Config, processes: int) -> dict[str, float]:
    """Row -> number of one process, with one update a round: bytes, but for the first two."""
    model, video, train, parallel = config.model, config.video, config.train, config.parallel
    module, sampling = transformer(model, {}), round_sampling(config, 0)
    layers, width = len(module.transformer_blocks), module.config.num_attention_heads * module.config.attention_head_dim
    learners = [parameter for parameter in module.parameters() if parameter.requires_grad]
    block = size(module.transformer_blocks[0].parameters())
    total, count, matrices = size(module.parameters()), size(learners), size(p for p in learners if p.ndim == 2)
    number = 2 if model.dtype == "bfloat16" else 4  # bytes of what the model computes with
    parts = processes if parallel.shard else 1
    samples = -(-train.groups_per_round * train.group_size * parallel.sequence // processes)
    batches = -(-samples // sampling.micro_batch)
    guided = 1 if sampling.guidance == 1 else 2  # calls of the model a velocity
    sampled, learned = config.sampler.steps, len(sampling.table.trained_steps)
    strategy = config.trust_region.strategy
    references = (strategy in POSITION) + (strategy in VELOCITY)
    tokens = ((video.frames - 1) // 4 + 1) * (video.height // 16) * (video.width // 16)
    latents = samples * 32 * tokens * 4
    rewards = [reward for reward in config.reward.models if reward.name == "videoalign" and not reward.offload]
    trained = 4 * count
    weights = 4 * total if model.train == "full" else number * (total - count) + trained
    states = 2 * trained - (4 * matrices if config.optimizer.kind == "muon" else 0)
    remembered = trained * (references + (config.optimizer.ema > 0))
    held = {
        "weights": weights / parts,
        "gradients (twice where diagnosed)": trained * (2 if train.diagnose_every else 1) / parts,
        "optimizer states": states / parts,
        "remembered policies": 0 if config.trust_region.offload_anchor else remembered / parts,
        "VAE": number * VAE,
        "VideoAlign": sum(VIDEOALIGN * (4 if reward.dtype == "float32" else 2) for reward in rewards),
        "latents of the round": (sampled + 1) * latents,
        "remembered policies' velocities": learned * references * latents,
        "conditioning, at most": number * samples * (TOKENS[0] * WIDTHS[0] + TOKENS[1] * WIDTHS[1]),
    }
    share = sampling.micro_batch * (tokens + sum(TOKENS)) * width / parallel.sequence
    kept, checkpointed = layers * guided, model.gradient_checkpointing
    update = {
        "update: inputs of all blocks": number * share * kept if checkpointed else 0,
        "update: inside of blocks (estimate)": BLOCK * share * (1 if checkpointed else kept),
        "update: two gathered blocks, one's gradient": (parts > 1) * (3 * number + 4) * block,
        "update: whole gradient of one branch": (parts > 1) * number * count * (guided - 1),
    }
    area = 256 * 256 if model.vae_tiling else video.height * video.width
    decode = DECODE * 128 * video.frames * area * number
    reads, exchanges = sampled + (references + 2) * learned, sampled + (references + 3) * learned
    ring = 4 * layers * tokens * width * number / parallel.sequence * (1 - 1 / parallel.sequence)
    sent = {
        "round sends: gradients of whole copies": 0 if parts > 1 else 2 * (1 - 1 / processes) * trained,
        "round sends: split weights": (1 - 1 / parts) * number * total * batches * guided * reads,
        "round sends: split gradients": (1 - 1 / parts) * trained * batches * learned,
        "round sends: tokens of shared videos": ring * batches * guided * exchanges,
    }
    most = {"decoding a video": decode, "**most at once**": sum(held.values()) + max(sum(update.values()), decode)}
    most["at the start, with text encoders"] = weights + number * (VAE + TEXT_ENCODERS)
    first, always = {"videos a round": samples, "trained parameters": count}, sum(held.values())
    return first | held | {"**held all the time**": always} | update | most | sent


def markdown(cases: Sequence[tuple[str, str, int, Sequence[str]]]) -> str:
    """The table, with a column a case: title, preset, processes, overrides."""
    columns = [column(load_config(preset, changes), count) for _, preset, count, changes in cases]
    lines = ["| GB, each process | " + " | ".join(title for title, *_ in cases) + " |", "|---|" + "---:|" * len(cases)]
    for place, name in enumerate(columns[0]):
        cells = [f"{c[name]:,.0f}" if place < 2 else f"{c[name] / 1e9:,.1f}" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    given = [(sys.argv[1], sys.argv[1], int(sys.argv[2]), sys.argv[3:])] if len(sys.argv) > 2 else CASES
    print(markdown(given))
