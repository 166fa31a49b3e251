"""Where a model's weights lie and whether they are all there, from file names and headers alone: nothing is loaded.

A model is a folder in diffusers' layout: model_index.json and one folder a part. The network is never asked.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagecli.backends import VideoSize
from sagecli.errors import UserError
from sagecli.hub import is_hub_id, local_folder

if TYPE_CHECKING:
    import torch

PIPELINE = "HunyuanVideo15Pipeline"


def locate(path: str, pipeline: str = PIPELINE) -> Path:
    """Folder of a complete model: path is "tiny", a folder, or a hub id that is in the cache.

    Raises UserError where nothing is there, where it is another pipeline's, and where a file is missing or cut short.
    """
    folder = _folder(path)
    again = f"`hf download {path}`" if is_hub_id(path) and not Path(path).is_dir() else "copying it again"
    for part in _parts(folder, pipeline):
        for file in _weight_files(folder / part):
            if not file.is_file():
                raise UserError(f"{folder} is incomplete: {part}/{file.name} is missing; complete it by {again}")
            if not _is_whole(file):
                raise UserError(
                    f"{file} is not a whole safetensors file (cut short, or a Git LFS pointer): get it by {again}"
                )
    return folder


def transformer_bytes(path: str, pipeline: str = PIPELINE) -> int:
    """Size in bytes of the transformer's weight files; raises UserError as locate does."""
    return sum(file.stat().st_size for file in _weight_files(locate(path, pipeline) / "transformer"))


def part_config(path: str, part: str, pipeline: str = PIPELINE) -> dict[str, Any]:
    """The config.json of a part; raises UserError as locate does."""
    return _json(locate(path, pipeline) / part / "config.json")


def check_size(path: str, size: VideoSize, pipeline: str = PIPELINE) -> None:
    """check_ratios with those of the model's VAE, before anything is loaded."""
    vae = part_config(path, "vae", pipeline)
    check_ratios(size, vae["spatial_compression_ratio"], vae["temporal_compression_ratio"])


def check_ratios(size: VideoSize, space: int, time: int) -> None:
    """UserError, naming the nearest sizes, unless space divides height and width, and time divides frames - 1."""
    for name, given, ratio, rest in (
        ("height", size.height, space, 0),
        ("width", size.width, space, 0),
        ("frames", size.frames, time, 1),
    ):
        below = (given - rest) // ratio * ratio + rest
        if below != given or given < 1:
            rule = f"a multiple of {ratio}" + (" plus 1" if rest else "")
            near = f"{below} or {below + ratio}" if below >= 1 else f"{rest or ratio}"
            raise UserError(f"video.{name} = {given} is not {rule}, which this model needs; nearest: {near}")


def load(kind: Any, part: Path, dtype: "torch.dtype") -> Any:
    """The model of that class from a part's folder, in that dtype; raises UserError unless every weight was there."""
    model, report = kind.from_pretrained(part, dtype=dtype, use_safetensors=True, output_loading_info=True)
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if wrong:
        raise UserError(
            f"{part} does not fit {kind.__name__}: {len(wrong)} weights are missing or misshapen, first {wrong[0]}"
        )
    return model


def _folder(path: str) -> Path:
    return Path(__file__).parent / "tiny" if path == "tiny" else local_folder(path, "model.path", " or 'tiny'")


def _parts(folder: Path, pipeline: str) -> list[str]:
    """Parts that have weights: those with a config.json, where tokenizers and schedulers name theirs otherwise."""
    index = _json(folder / "model_index.json")
    if index.get("_class_name") != pipeline:
        given = index.get("_class_name", "no pipeline: it has no model_index.json")
        raise UserError(f"{folder} should hold a {pipeline} but holds {given}")
    parts = [name for name, kind in index.items() if isinstance(kind, list) and kind[0] is not None]
    for part in parts:
        if not any((folder / part).glob("*config.json")):
            raise UserError(f"{folder} is incomplete: {part}/ or its config file is missing")
    return [part for part in parts if (folder / part / "config.json").is_file()]


def _weight_files(part: Path) -> list[Path]:
    for index in part.glob("*.safetensors.index.json"):
        return [part / shard for shard in sorted(set(_json(index)["weight_map"].values()))]
    diffusers = (part / "config.json").is_file() and "_diffusers_version" in _json(part / "config.json")
    return [part / ("diffusion_pytorch_model.safetensors" if diffusers else "model.safetensors")]


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error


def _is_whole(file: Path) -> bool:
    """Whether a safetensors file has the length that its header says: 8 bytes, a JSON header, the tensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if 8 + length > size:
            return False
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return False
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return size == 8 + length + max(ends, default=0)
