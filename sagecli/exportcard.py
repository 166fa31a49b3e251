"""The model card beside exported weights: front matter for the hub, what it is, and a few lines that load it."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData

from sagecli.hub import is_hub_id, local_folder

if TYPE_CHECKING:
    from sagecli.config import Config

LICENSES = {
    "HunyuanVideo15Pipeline": {
        "license": "other",
        "license_name": "tencent-hunyuan-community",
        "license_link": "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5/blob/main/LICENSE",
    },
    "WanPipeline": {"license": "apache-2.0"},
}
"""Of the released base models, which their adapters and fine-tunes share."""
TINY = 'str(files("sagecli.backends") / "tiny")'


def write_card(folder: Path, config: "Config", facts: dict[str, Any], prompt: str) -> None:
    """Write README.md. facts: those of export.json."""
    path = config.model.path
    pipeline = "HunyuanVideo15Pipeline" if path == "tiny" else _pipeline(path)
    license: dict[str, Any] = (
        {"license": "apache-2.0"} if path == "tiny" else LICENSES.get(pipeline, {"license": "unknown"})
    )
    data = ModelCardData(
        base_model=path if is_hub_id(place(path)) else None,
        library_name="peft" if facts["format"] == "peft" else "diffusers",
        pipeline_tag="text-to-video",
        tags=[
            "text-to-video",
            "reinforcement-learning",
            "sage-grpo",
            *([] if facts["format"] == "merged" else ["lora"]),
        ],
        **license,
    )
    rewards = ", ".join(f"{model.name} {model.weights}" for model in config.reward.models)
    average = "the moving average of the weights" if facts["ema"] else "the weights"
    text = f"""---
{data.to_yaml()}
---

# {path}, post-trained with SAGE-GRPO

{average.capitalize()} after {facts["round"]} rounds ({facts["update"]} updates) on {path}, rewarded by {rewards}; as
{facts["format"]}, {facts["dtype"]}. config.toml is the run's whole configuration, summary.json what its evaluations
measured, export.json how this folder was made.

{_how_to_load(config, facts["format"], prompt, pipeline, facts["transformer"])}
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def _pipeline(path: str) -> str:
    index = local_folder(path, "model.path") / "model_index.json"
    return str(json.loads(index.read_text(encoding="utf-8"))["_class_name"])


def _how_to_load(config: "Config", kind: str, prompt: str, pipeline: str, transformer: str) -> str:
    if kind == "comfyui":
        return "Copy lora_comfyui.safetensors to ComfyUI/models/loras/ and choose it in a LoraLoaderModelOnly node."
    if kind == "tencent":
        return "pytorch_lora_weights.safetensors has the layer names of the model's original repository."
    return f"Run in this folder:\n\n```python\n{_snippet(config, kind, prompt, pipeline, transformer)}\n```"


def place(path: str) -> str:
    """A base folder's absolute path, because an export is used elsewhere; a hub id, and "tiny", as it is."""
    folder = Path(os.path.expanduser(path))
    return str(folder.resolve()) if folder.is_dir() else path


def _snippet(config: "Config", kind: str, prompt: str, pipeline: str, transformer: str) -> str:
    """At most ten lines that load the weights and make a video."""
    video, path = config.video, config.model.path
    half = config.model.dtype == "bfloat16"
    base = TINY if path == "tiny" else repr(place(path))
    more = ", dtype=torch.bfloat16" if half else ""
    device = '.to("cuda")' if half else ""
    load = f"pipe = {pipeline}.from_pretrained({base}{more}){device}"
    lines = ["import torch"] if half else []
    lines += ["from importlib.resources import files"] if path == "tiny" else []
    lines += ["import imageio.v3 as iio"]
    if kind == "merged":
        load = f"pipe = {pipeline}.from_pretrained({base}, transformer=transformer{more}){device}"
        lines += [
            f"from diffusers import {pipeline}, {transformer}",
            f'transformer = {transformer}.from_pretrained("."{more})',
            load,
        ]
    elif kind == "peft":
        lines += [f"from diffusers import {pipeline}", "from peft import PeftModel", load]
        lines += ['PeftModel.from_pretrained(pipe.transformer, ".")']
    else:
        lines += [f"from diffusers import {pipeline}", load]
        lines += [
            'pipe.transformer.load_lora_adapter(".", weight_name="pytorch_lora_weights.safetensors", prefix=None)'
        ]
    size = f"height={video.height}, width={video.width}, num_frames={video.frames}"
    lines += [
        f"frames = pipe({prompt!r}, {size}, num_inference_steps={config.eval.steps}).frames[0]",
        'video = (frames * 255).round().astype("uint8")',
        f'iio.imwrite("video.mp4", video, plugin="pyav", codec="libx264", fps={video.fps:g})',
    ]
    return "\n".join(lines)
