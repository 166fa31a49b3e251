"""Trained weights in each format of `sage export`, and each format's own check.

A check loads what was written with the library that will load it, into a fresh base model, and compares velocities on
fixed inputs; the namings that no library here loads (tencent, comfyui) are checked by rebuilding from the file alone
what is added to every layer's weight.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sagecli.backends import Backbone, VideoSize
from sagecli.backends.original_names import Place, original_place
from sagecli.errors import RunStopped, UserError

FORMATS = ("diffusers", "peft", "merged", "tencent", "comfyui")
ADAPTER = "default"
LORA_FILE = "pytorch_lora_weights.safetensors"  # diffusers' own name
METADATA_KEY = "lora_adapter_metadata"  # likewise
CHECK_PROMPT = "a red ball rolls to the left"
CHECK_SIZE = VideoSize(64, 64, 5)
SAME = 1e-5
"""Largest difference of velocities, relative to the largest velocity, of one model computed twice."""
NOISE = 1e-6
"""Such differences below this say nothing: float32 itself makes them."""


@dataclass(frozen=True)
class Checked:
    """What a check found."""

    difference: float
    """Between the export, loaded again, and what was to be stored: relative to the largest velocity, or entry of what
    is added to a layer's weight."""
    changed: float | None
    """Likewise, between the trained model and the base: velocities; None where weights were compared."""
    lost: float | None
    """The share of what training changed, in velocities or weights, that storing changed; None: it changed nothing."""


@dataclass(frozen=True)
class Lora:
    """One layer's adapter: scale * up @ down is added to its weight."""

    down: Tensor
    """[r, in]."""
    up: Tensor
    """[out, r]."""
    scale: float

    @property
    def delta(self) -> Tensor:
        """What is added to the weight, [out, in]."""
        return self.scale * (self.up.float() @ self.down.float())


def loras(module: nn.Module, dtype: torch.dtype) -> dict[str, Lora]:
    """The adapter of every layer that has one, by the layer's name."""
    return {
        name: Lora(
            layer.lora_A[ADAPTER].weight.detach().to(dtype).contiguous(),
            layer.lora_B[ADAPTER].weight.detach().to(dtype).contiguous(),
            float(layer.scaling[ADAPTER]),
        )
        for name, layer in module.named_modules()
        if isinstance(layer, LoraLayer)
    }


@torch.no_grad()
def velocities(backbone: Backbone) -> Tensor:
    """Velocities on fixed inputs, at much noise and at little."""
    conditioning = backbone.encode([CHECK_PROMPT])[CHECK_PROMPT]
    backbone.free_text_encoders()
    latents = backbone.initial_latents([0], CHECK_SIZE)
    return torch.cat([backbone.velocity(latents, sigma, conditioning, 1.0) for sigma in (0.9, 0.3)])


def write(backbone: Backbone, name: str, kind: str, dtype: torch.dtype, folder: Path) -> None:
    """Write the backbone's weights in a format; name is the backbone's registered name. Its module may change."""
    module: Any = backbone.module
    if kind == "merged":
        if hasattr(module, "peft_config"):
            module.fuse_lora()
            module.unload_lora()
        _round(module, dtype)
        module.save_pretrained(folder, max_shard_size="5GB")
        return
    if kind in ("tencent", "comfyui"):
        _write_named(module, name, kind, dtype, folder)
        return
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    config = module.peft_config[ADAPTER]
    config.target_modules, config.exclude_modules = set(loras(module, dtype)), None  # by name, as every tool reads it
    if kind == "diffusers":
        module.save_lora_adapter(folder, adapter_name=ADAPTER, weight_name=LORA_FILE)
        return
    state = get_peft_model_state_dict(module, adapter_name=ADAPTER, save_embedding_layers=False)
    save_file(
        {f"base_model.model.{key}": value.contiguous() for key, value in state.items()},
        folder / "adapter_model.safetensors",
        {"format": "pt"},
    )
    config.save_pretrained(folder)


def _round(module: nn.Module, dtype: torch.dtype) -> None:
    """Give a module's weights a dtype; not its buffers: tables (of rotary positions) that loaders compute anew."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def stored_velocities(backbone: Backbone) -> Tensor:
    """Velocities of the weights as `write` left them in the module: rounded to the dtype they are stored in."""
    _round(backbone.module, torch.float32)
    return velocities(backbone)


def check(fresh: Backbone, trained: Tensor, stored: Tensor, kind: str, folder: Path) -> Checked:
    """Load the export into a fresh base model and compare with the velocities of what was to be stored.

    trained: velocities before weights were rounded to the export's dtype. RunStopped for a difference over SAME, or
    over half of what training changed: one nearer to the base than to the trained model differs by that much.
    """
    module: Any = fresh.module
    base = velocities(fresh)
    if kind == "diffusers":
        module.load_lora_adapter(folder, weight_name=LORA_FILE, use_safetensors=True, prefix=None, adapter_name=ADAPTER)
    elif kind == "peft":
        PeftModel.from_pretrained(module, str(folder))
    else:
        _replace_weights(module, folder)
    changed = float((trained - base).abs().max() / trained.abs().max())
    difference = float((velocities(fresh) - stored).abs().max() / stored.abs().max())
    if not difference <= max(NOISE, min(SAME, changed / 2)):
        raise RunStopped(
            f"the {kind} export, loaded again, gives velocities that differ by {difference:.1e} of their size, where "
            f"training changed them by {changed:.1e}"
        )
    return Checked(difference, changed, _share((stored - trained).norm(), (trained - base).norm()))


def _share(part: Tensor, whole: Tensor) -> float | None:
    return float(part / whole) if whole > 0 else None


def _replace_weights(module: Any, folder: Path) -> None:
    """Give a module the weights of a transformer folder, read by its class; two copies never lie in memory."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)
    weights = type(module).from_pretrained(folder).state_dict()
    for name, parameter in module.named_parameters():
        parameter.data = weights.pop(name).float()


def _write_named(module: nn.Module, name: str, naming: str, dtype: torch.dtype, folder: Path) -> None:
    """The adapter under another repository's names."""
    groups = _placed(loras(module, dtype), name, naming)
    tensors: dict[str, Tensor] = {}
    for layer, parts in groups.items():
        lora = _stacked(parts)
        prefix = f"diffusion_model.{layer}" if naming == "comfyui" else layer
        tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = lora.down, lora.up
        if naming == "comfyui":
            tensors[f"{prefix}.alpha"] = torch.tensor(lora.scale * len(lora.down))
    if naming == "comfyui":
        save_file(tensors, folder / "lora_comfyui.safetensors", {"format": "pt"})
        return
    first = next(iter(loras(module, dtype).values()))
    rank = len(first.down)
    metadata = {"r": rank, "lora_alpha": first.scale * rank, "target_modules": sorted(groups), "peft_type": "LORA"}
    save_file(tensors, folder / LORA_FILE, {"format": "pt", METADATA_KEY: json.dumps(metadata)})


def _placed(layers: dict[str, Lora], name: str, naming: str) -> dict[str, dict[Place, Lora]]:
    """Adapters by the other naming's layer; UserError for one that it has no name for."""
    groups: dict[str, dict[Place, Lora]] = defaultdict(dict)
    for layer, lora in layers.items():
        place = original_place(name, naming, layer)
        if place is None:
            raise UserError(
                f"--format {naming} has no name for {layer} of a {name} model; use diffusers, peft or merged"
            )
        groups[place.layer][place] = lora
    return groups


def _stacked(parts: dict[Place, Lora]) -> Lora:
    """One adapter of a fused layer: the downs stacked, the ups block by block on the diagonal. Exact, of rank 3 r."""
    if next(iter(parts)).parts == 1:
        return next(iter(parts.values()))
    rows, rank = next(iter(parts.values())).up.shape
    place = next(iter(parts))
    up = torch.zeros(rows * place.parts, rank * len(parts), dtype=next(iter(parts.values())).up.dtype)
    ordered = sorted(parts.items(), key=lambda item: item[0].part)
    for column, (where, lora) in enumerate(ordered):
        up[where.part * rows : (where.part + 1) * rows, column * rank : (column + 1) * rank] = lora.up
    return Lora(torch.cat([lora.down for _, lora in ordered]), up, ordered[0][1].scale)


def check_named(module: nn.Module, name: str, naming: str, dtype: torch.dtype, folder: Path) -> Checked:
    """Compare what the file adds to every weight with what was to be stored; one layer's weight lies in memory at once.

    RunStopped where any layer differs by more than SAME, and where the file has more or fewer layers.
    """
    read = _read_named(folder / ("lora_comfyui.safetensors" if naming == "comfyui" else LORA_FILE), naming)
    exact, rounded = (_placed(loras(module, kind), name, naming) for kind in (torch.float32, dtype))
    difference, lost, whole = 0.0, torch.zeros(()), torch.zeros(())
    if read.keys() != exact.keys():
        raise RunStopped(f"the {naming} export, read again, has other layers: {sorted(read.keys() ^ exact.keys())[:3]}")
    for layer, parts in exact.items():
        trained, stored = _delta(parts), _delta(rounded[layer])
        error = (read[layer].delta - stored).abs().max() / stored.abs().max().clamp(min=1e-30)
        difference = max(difference, float(error))
        lost, whole = lost + (stored - trained).square().sum(), whole + trained.square().sum()
        if not difference <= SAME:
            raise RunStopped(f"the {naming} export, read again, adds other weights to {layer}: by {difference:.1e}")
    return Checked(difference, None, _share(lost.sqrt(), whole.sqrt()))


def _delta(parts: dict[Place, Lora]) -> Tensor:
    """What is added to the weight of a layer there: to rows that no layer of ours has, nothing."""
    own = {place.part: lora.delta for place, lora in parts.items()}
    nothing = torch.zeros_like(next(iter(own.values())))
    return torch.cat([own.get(part, nothing) for part in range(next(iter(parts)).parts)])


def _read_named(file: Path, naming: str) -> dict[str, Lora]:
    """The adapter of each layer in a file, from the file alone."""
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    tensors, layers = load_file(file), {}
    for key in (key for key in tensors if key.endswith(".lora_A.weight")):
        layer = key.removesuffix(".lora_A.weight")
        down, up = tensors[key], tensors[f"{layer}.lora_B.weight"]
        if naming == "comfyui":
            alpha = float(tensors[f"{layer}.alpha"])
        else:
            alpha = json.loads(metadata[METADATA_KEY])["lora_alpha"]
        layers[layer.removeprefix("diffusion_model.")] = Lora(down, up, alpha / len(down))
    return layers
