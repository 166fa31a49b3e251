"""VideoAlign (VideoReward, arXiv 2501.13918): visual quality VQ, motion quality MQ and text alignment TA of videos.

Qwen2-VL reads the frames and a template that holds the user's prompt; a linear head is read at three special tokens,
and score = (raw - mean) / std with the checkpoint's own numbers. VQ's and MQ's tokens stand before the prompt, so with
a causal model they do not depend on it. Positions are 1-D, as in training, not Qwen2-VL's three-dimensional ones.
Source: METHOD.md section 7.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from sagecli.errors import UserError
from sagecli.hub import local_folder, read_part
from sagecli.rewards import Reward, Scores
from sagecli.rewards.videoalign_template import KNOWN_SHA256, PROMPT, SOURCE, TOKENS, read_template
from sagecli.rewards.videoalign_weights import (
    BASE_HUB_ID,
    HEAD,
    HUB_ID,
    fill,
    find_files,
    load_weights,
    table_in,
)

MIN_PIXELS = 100352  # 128 image tokens of 28 x 28 pixels
MAX_FRAMES = 768
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
GET_RELEASED = f"""VideoAlign's released weights are not in the Hugging Face cache. Three things are needed:
      hf download {HUB_ID} --local-dir VideoReward     (5.0 GB)
      hf download {BASE_HUB_ID} --include "*.json" --include "*.txt"     (the model under it: config, tokenizer)
      curl -L -o VideoReward/prompt_template.txt \\
        {SOURCE}
    and the folder's name: --path videoalign=VideoReward, or path = "VideoReward" in [[reward.models]]"""


class VideoAlign(Reward):
    """Scores videos as VideoAlign's released model does. Details: raw scores, checkpoint, hash of the template."""

    axes = tuple(TOKENS)

    def __init__(
        self,
        path: str = HUB_ID,
        base: str | None = None,
        template: str | None = None,
        step: int | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        differentiable: bool = False,
    ) -> None:
        """Look for the files of a folder or hub id; UserError for what is missing or is another kind of model.

        base: Qwen2-VL's folder or hub id, else the one that the checkpoint names. template: the prompt template's file
        or a VideoAlign checkout, else the folder's prompt_template.txt. step: which checkpoint-N, else the highest.
        differentiable: resized frames are not rounded to 8 bit, so that scores have gradients in the pixels.
        """
        if path == HUB_ID:
            try:
                local_folder(path, "path")
            except UserError:
                raise UserError(GET_RELEASED) from None
        self.files = find_files(path, base, step)
        self.template = read_template(template, self.files.folder)
        _check(self.files.settings)
        self.tokenizer = _tokenizer(self.files.base)
        self.dtype = getattr(torch, dtype)
        self.differentiable = differentiable

    def load(self) -> str:
        """Load the network, LoRA merged; UserError unless every weight has its place and every place its weight."""
        from accelerate import init_empty_weights
        from transformers import Qwen2VLConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

        config = read_part(Qwen2VLConfig.from_pretrained, self.files.base, "config.json")
        config.text_config.vocab_size = len(self.tokenizer)
        weights, report = load_weights(self.files, len(self.tokenizer))
        with init_empty_weights(include_buffers=False):
            model = Qwen2VLModel(config)
            head = nn.Linear(config.text_config.hidden_size, 1, bias=False)
        head_weight = {"weight": weights.pop(HEAD)} if HEAD in weights else {}
        fill(model, weights, self.files.checkpoint)
        fill(head, head_weight, self.files.checkpoint)
        for parameter in model.parameters():  # not the buffers: rotary frequencies in half precision give other angles
            parameter.data = parameter.data.to(self.dtype)
        self.module = nn.ModuleDict({"model": model, "head": head.float()}).eval().requires_grad_(False)
        return report

    def frames(self, total: int, fps: float) -> list[int]:
        """An even number of frames at the checkpoint's rate, 4 to 768 where the video has them, spread evenly."""
        if total < 2:
            return [0, 0]
        wanted = total / fps * self.files.settings["data_config"]["fps"]
        cap = min(MAX_FRAMES, total) // 2 * 2
        count = 2 * round(min(max(wanted, 4), cap) / 2)
        return [round(index * (total - 1) / (count - 1)) for index in range(count)]

    def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
        """Scores of videos [B, n, 3, H, W] in [0, 1], n even; fps only chose the frames."""
        network, head = self.network["model"], self.network["head"]
        device = network.device
        vision = network.config.vision_config
        frames = resize(videos.to(device), self.files.settings["data_config"]["max_frame_pixels"], self.differentiable)
        patches, grid = patchify(frames, vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        tokens = self.tokenize(prompts, int(grid.prod()) // vision.spatial_merge_size**2).to(device)
        hidden = network(
            input_ids=tokens,  # no mask: padding stands on the right, where a causal model never looks
            pixel_values_videos=patches.to(network.dtype),
            video_grid_thw=grid.to(device).expand(len(videos), 3),
            position_ids=torch.arange(tokens.shape[1], device=device).expand(3, *tokens.shape),
            use_cache=False,
        ).last_hidden_state
        values = head(self._at_tokens(hidden, tokens).to(head.weight.dtype))[..., 0]
        raw = dict(zip(self.axes, values.unbind(1), strict=True))
        return Scores(
            {axis: self._normalised(axis, raw[axis]) for axis in raw},
            {},
            self._details(raw),
            self._warnings(len(videos)),
        )

    def tokenize(self, prompts: Sequence[str], video_tokens: int) -> Tensor:
        """Token numbers [B, L] of the chat with a video and the template; padded on the right."""
        texts = []
        for prompt in prompts:
            text = self.template.text.replace(PROMPT, self._neutral(prompt))
            content = [{"type": "video"}, {"type": "text", "text": text}]
            chat = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            texts.append(chat.replace("<|video_pad|>", "<|video_pad|>" * video_tokens))
        encoded = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        ids: Tensor = encoded["input_ids"]
        return ids

    def _neutral(self, prompt: str) -> str:
        """A prompt whose words cannot be taken for special tokens."""
        for token in self.tokenizer.get_added_vocab():
            prompt = prompt.replace(token, f"{token[0]} {token[1:]}")
        return prompt

    def _at_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Hidden states [B, axes, C] of [B, L, C] at the special tokens, each of which stands once in a row."""
        numbers = self.tokenizer.convert_tokens_to_ids(list(TOKENS.values()))
        places = torch.stack([(tokens == number).int().argmax(1) for number in numbers], 1)
        return hidden.gather(1, places[..., None].expand(*places.shape, hidden.shape[-1]))

    def _normalised(self, axis: str, raw: Tensor) -> Tensor:
        numbers = self.files.settings.get("inference_config")
        return raw if numbers is None else (raw - numbers[f"{axis}_mean"]) / numbers[f"{axis}_std"]

    def _details(self, raw: dict[str, Tensor]) -> list[dict[str, Any]]:
        rows = zip(*(values.tolist() for values in raw.values()), strict=True)
        shared = {
            "model": str(self.files.checkpoint.resolve()),
            "template_sha256": self.template.sha256,
            "template_known": self._known(),
        }
        return [{"raw": dict(zip(raw, row, strict=True))} | shared for row in rows]

    def _known(self) -> bool:
        return self.template.sha256 == KNOWN_SHA256

    def _warnings(self, count: int) -> list[tuple[int, str]]:
        if self._known():
            return []
        sentence = (
            f"the prompt template is not VideoAlign's own (sha256 {self.template.sha256[:12]}..., "
            f"where {KNOWN_SHA256[:12]}... is known)"
        )
        return [(index, sentence) for index in range(count)]


def _check(settings: dict[str, Any]) -> None:
    """UserError for a model_config.json of a kind that this reward does not compute."""
    data, model = table_in(settings, "data_config"), table_in(settings, "model_config")
    for table, key, needed in (
        (data, "prompt_template_type", "detailed_special"),
        (data, "sample_type", "uniform"),
        (data, "num_frames", None),
        (model, "reward_token", "special"),
        (model, "output_dim", 1),
    ):
        if table.get(key, needed) != needed:
            raise UserError(
                f"model_config.json: {key} = {table[key]!r}; the videoalign reward computes {needed!r} only"
            )
    for key in ("fps", "max_frame_pixels"):
        _check_number(data, f"data_config.{key}", positive=True)
    if settings.get("inference_config") is not None:  # what scores are normalised by
        numbers = table_in(settings, "inference_config")
        for axis in TOKENS:
            _check_number(numbers, f"inference_config.{axis}_mean", positive=False)
            _check_number(numbers, f"inference_config.{axis}_std", positive=True)


def _check_number(table: dict[str, Any], name: str, positive: bool) -> None:
    key = name.partition(".")[2]
    if key not in table:
        raise UserError(f"model_config.json: {name} is missing; is this VideoAlign's own file?")
    value = table[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (positive and value <= 0):
        raise UserError(f"model_config.json: {name} = {value!r}; it takes a {'positive ' if positive else ''}number")


def _tokenizer(folder: Any) -> Any:
    """The base model's tokenizer with the special tokens; UserError where its files are missing."""
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        raise UserError(
            f"{folder}: no tokenizer.json, so the tokenizer is missing; get it by `hf download {BASE_HUB_ID}`"
        )
    from transformers import AutoTokenizer

    tokenizer = read_part(AutoTokenizer.from_pretrained, folder, "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS.values())})
    if tokenizer.chat_template is None:
        raise UserError(f"{folder}: its tokenizer has no chat template; it needs Qwen2-VL-Instruct's own")
    return tokenizer


def resize(videos: Tensor, max_pixels: int, differentiable: bool) -> Tensor:
    """Frames [B, n, 3, H, W] in [0, 1] at the size Qwen2-VL sees, their values those of 8-bit pixels / 255."""
    size = seen_size(videos.shape[-2], videos.shape[-1], max_pixels)
    few = videos.flatten(0, 1).split(8)  # at full size, a film's frames in float32 would not fit
    resized = torch.cat([_resized(frames, size, differentiable) for frames in few])
    return resized.view(*videos.shape[:3], *size)


def _resized(frames: Tensor, size: tuple[int, int], differentiable: bool) -> Tensor:
    pixels = frames.to(torch.promote_types(frames.dtype, torch.float32)) * 255
    pixels = pixels if differentiable else pixels.round()
    pixels = interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 255)
    return (pixels if differentiable else pixels.round()) / 255


def seen_size(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """Height and width as multiples of 28, their area from MIN_PIXELS to max_pixels, the shape nearly kept."""
    rounded = tuple(max(28, round(side / 28) * 28) for side in (height, width))
    if rounded[0] * rounded[1] > max_pixels:
        factor = math.sqrt(height * width / max_pixels)
        rounded = tuple(max(28, math.floor(side / factor / 28) * 28) for side in (height, width))
    elif rounded[0] * rounded[1] < MIN_PIXELS:
        factor = math.sqrt(MIN_PIXELS / (height * width))
        rounded = tuple(math.ceil(side * factor / 28) * 28 for side in (height, width))
    return rounded[0], rounded[1]


def patchify(frames: Tensor, patch: int, pair: int, merge: int) -> tuple[Tensor, Tensor]:
    """Normalised patches [B * t * h * w, 3 * pair * patch^2] of frames [B, n, 3, H, W], and the grid (t, h, w).

    Patches of one merge x merge block of the vision tower follow each other; each spans `pair` frames.
    """
    mean, std = (frames.new_tensor(value).view(3, 1, 1) for value in (PIXEL_MEAN, PIXEL_STD))
    batch, count, _, height, width = frames.shape
    grid = (count // pair, height // patch, width // patch)
    blocks = ((frames - mean) / std).reshape(
        batch, grid[0], pair, 3, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch
    )
    patches = blocks.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(batch * math.prod(grid), -1)
    return patches, torch.tensor([grid])
