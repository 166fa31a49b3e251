"""CLIPScore: how near CLIP's embeddings of a video's frames are to that of its prompt (arXiv 2104.08718).

cos is the mean, over frames spread evenly, of the cosine between a frame's embedding and the prompt's. METHOD.md
section 7: the paper does not say how it scales it, so three scales are offered and named in the output.
"""

from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sagecli.config_base import Count
from sagecli.errors import UserError
from sagecli.hub import local_folder, read_part, refuse_pointer
from sagecli.rewards import Reward, Scores, even_frames

Dtype = Literal["float32", "bfloat16", "float16"]
SCALES = {
    "x2.5": lambda cosine: 2.5 * cosine.clamp(min=0),
    "div30": lambda cosine: 100 * cosine / 30,
    "cosine": lambda cosine: cosine,
}


class ClipReward(Reward):
    """What scores from a CLIP model have in common: loading it, and cosines of frames and prompts."""

    def __init__(self, path: str, processor: str, frames: int, dtype: str) -> None:
        """Look for the files; UserError for a missing one. path: the model's folder or hub id; processor: likewise, of
        its tokenizer and image processor.
        """
        self.folder = local_folder(path, "the reward's path")
        self.processor = local_folder(processor, "the reward's processor")
        if not any((self.folder / name).is_file() for name in ("model.safetensors", "pytorch_model.bin")):
            raise UserError(f"{self.folder}: no model.safetensors or pytorch_model.bin; is this a CLIP model's folder?")
        for name, what in (("preprocessor_config.json", "image processor"), ("vocab.json", "tokenizer")):
            if not (self.processor / name).is_file() and not (name == "vocab.json" and self._has_fast_tokenizer()):
                raise UserError(f"{self.processor}: no {name}, so its {what} is missing; complete the folder")
        self.count = frames
        self.dtype = getattr(torch, dtype)

    def _has_fast_tokenizer(self) -> bool:
        return (self.processor / "tokenizer.json").is_file()

    def load(self) -> str:
        """Load the model; UserError unless every weight was there and no other."""
        from transformers import AutoTokenizer, CLIPModel
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        self.tokenizer = read_part(AutoTokenizer.from_pretrained, self.processor, "tokenizer")
        self.images = read_part(CLIPImageProcessorPil.from_pretrained, self.processor, "image processor")
        self.module = load_whole(CLIPModel, self.folder, self.dtype).eval().requires_grad_(False)
        return f"{self.folder}: {len(self.module.state_dict())} weights loaded"

    def frames(self, total: int, fps: float) -> list[int]:
        """Frames spread evenly from the first to the last."""
        return even_frames(total, self.count)

    def cosines(self, videos: Tensor, prompts: Sequence[str]) -> Tensor:
        """Mean cosine [B] of videos [B, n, 3, H, W] in [0, 1] and their prompts, in float32."""
        device = next(self.network.parameters()).device
        pixels = self.images(list((videos.flatten(0, 1) * 255).round().byte().cpu()), return_tensors="pt")[
            "pixel_values"
        ]
        limit = self.network.config.text_config.max_position_embeddings
        text = self.tokenizer(list(prompts), padding=True, truncation=True, max_length=limit, return_tensors="pt")
        images = self.network.get_image_features(pixels.to(device, self.network.dtype)).pooler_output.float()
        texts = self.network.get_text_features(**text.to(device)).pooler_output.float()
        similar = normalize(images, dim=-1).unflatten(0, videos.shape[:2]) @ normalize(texts, dim=-1)[:, :, None]
        cosine: Tensor = similar[..., 0].mean(1)
        return cosine

    def cut(self, prompts: Sequence[str]) -> list[tuple[int, str]]:
        """A warning for each prompt that is longer than the model reads."""
        limit = self.network.config.text_config.max_position_embeddings
        lengths = [len(ids) for ids in self.tokenizer(list(prompts), verbose=False)["input_ids"]]
        sentence = f"the prompt is longer than {limit} tokens; the rest was not read"
        return [(index, sentence) for index, length in enumerate(lengths) if length > limit]


class ClipScore(ClipReward):
    """CLIPScore. Details: the cosine, the scale, the model."""

    axes = ("CLIPScore",)

    def __init__(
        self,
        path: str = "openai/clip-vit-large-patch14",
        frames: Count = 8,
        scale: Literal["x2.5", "div30", "cosine"] = "x2.5",
        dtype: Dtype = "float32",
    ) -> None:
        """scale: 2.5 * max(cos, 0), 100 * cos / 30, or cos itself. path: a folder or hub id; UserError without it."""
        super().__init__(path, path, frames, dtype)
        self.scale = scale

    def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
        """Scores of videos [B, n, 3, H, W] in [0, 1]."""
        cosine = self.cosines(videos, prompts)
        shared = {"scale": self.scale, "model": str(self.folder.resolve())}
        details = [{"raw": {"CLIPScore": value}} | shared for value in cosine.tolist()]
        return Scores({"CLIPScore": SCALES[self.scale](cosine)}, {}, details, self.cut(prompts))


def load_whole(kind: Any, folder: Path, dtype: torch.dtype) -> Any:
    """A transformers model from a folder; UserError, naming the first, unless its weights are exactly the file's."""
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

    for name in ("model.safetensors", "pytorch_model.bin"):
        refuse_pointer(folder / name)
    disable_progress_bar()
    verbosity = get_verbosity()
    set_verbosity_error()  # it would print a table of what differs
    try:
        model, report = kind.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, local_files_only=True
        )
    except (SafetensorError, UnpicklingError, EOFError, RuntimeError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it ends too early"
        raise UserError(f"{folder}: its weights or its config cannot be read ({reason}); get it again") from None
    finally:
        set_verbosity(verbosity)
    wrong = [*report["missing_keys"], *report["unexpected_keys"], *(key for key, *_ in report["mismatched_keys"])]
    if wrong:
        raise UserError(
            f"{folder} does not fit {kind.__name__}: {len(wrong)} weights are missing, unknown or misshapen, "
            f"first {min(wrong)}"
        )
    return model
