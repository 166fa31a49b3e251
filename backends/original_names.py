"""What the layers of diffusers' transformers are called in the models' own repositories and in ComfyUI.

A layer of ours is a whole layer there, or one of several parts of it that are stacked by rows (q, k and v of one fused
linear). HunyuanVideo-1.5's names are those that diffusers' conversion script reads.
"""

import re
from dataclasses import dataclass

HUNYUANVIDEO15 = {
    "attn.to_q": "img_attn_q",
    "attn.to_k": "img_attn_k",
    "attn.to_v": "img_attn_v",
    "attn.to_out.0": "img_attn_proj",
    "attn.add_q_proj": "txt_attn_q",
    "attn.add_k_proj": "txt_attn_k",
    "attn.add_v_proj": "txt_attn_v",
    "attn.to_add_out": "txt_attn_proj",
    "ff.net.0.proj": "img_mlp.fc1",
    "ff.net.2": "img_mlp.fc2",
    "ff_context.net.0.proj": "txt_mlp.fc1",
    "ff_context.net.2": "txt_mlp.fc2",
    "norm1.linear": "img_mod.linear",
    "norm1_context.linear": "txt_mod.linear",
}
"""Within transformer_blocks.N, which is double_blocks.N there."""
COMFYUI = {"_attn_proj": "_attn.proj", "_mlp.fc1": "_mlp.0", "_mlp.fc2": "_mlp.2", "_mod.linear": "_mod.lin"}
WAN = {
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "net.0.proj": "0",
    "net.2": "2",
    "attn1": "self_attn",
    "attn2": "cross_attn",
}
"""Within blocks.N, which has the same name there."""


@dataclass(frozen=True)
class Place:
    """Where a layer of ours stands in another naming."""

    layer: str
    part: int = 0
    parts: int = 1
    """The layer's rows are those of `parts` layers of ours, stacked; ours is the part-th."""


def original_place(backbone: str, naming: str, layer: str) -> Place | None:
    """Place of a layer in "tencent" or "comfyui" naming; None where that naming has no such layer."""
    if backbone == "hunyuanvideo15":
        return _hunyuanvideo15(layer, fused=naming == "comfyui")
    if backbone == "wan" and naming == "comfyui":
        return _wan(layer)
    return None


def _hunyuanvideo15(layer: str, fused: bool) -> Place | None:
    match = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", layer)
    name = HUNYUANVIDEO15.get(match[2]) if match else None
    if match is None or name is None:
        return None
    block = f"double_blocks.{match[1]}"
    if not fused:
        return Place(f"{block}.{name}")
    if projection := re.fullmatch(r"(img|txt)_attn_([qkv])", name):
        return Place(f"{block}.{projection[1]}_attn.qkv", "qkv".index(projection[2]), 3)
    for ours, theirs in COMFYUI.items():
        name = name.replace(ours, theirs)
    return Place(f"{block}.{name}")


def _wan(layer: str) -> Place | None:
    match = re.fullmatch(r"(blocks\.\d+)\.(attn1|attn2|ffn)\.(to_q|to_k|to_v|to_out\.0|net\.0\.proj|net\.2)", layer)
    return Place(f"{match[1]}.{WAN.get(match[2], match[2])}.{WAN[match[3]]}") if match else None
