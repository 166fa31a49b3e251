"""Tiny random reward models in the real on-disk formats, for several test files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

TEMPLATE = (
    "Watch the clip.\nHow clear is it? <|VQ_reward|>\nHow smooth is it? <|MQ_reward|>\n"
    "It should show: {text_prompt}\nDoes it? <|TA_reward|>\n"
)
STATISTICS = {"VQ_mean": 0.2, "VQ_std": 0.5, "MQ_mean": -0.1, "MQ_std": 0.25, "TA_mean": 0.3, "TA_std": 2.0}
RANK, ALPHA = 2, 6
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
REWARD_TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")


@dataclass(frozen=True)
class VideoAlignModel:
    """What a test compares with: the folders, and the model that was saved, LoRA not merged."""

    base: Path
    folder: Path
    peft: Any


def save_videoalign(folder: Path, whole: bool = True, new_keys: bool = False) -> VideoAlignModel:
    """A base folder and a VideoAlign folder: model.pth or LoRA files, keys of either transformers generation."""
    base, own = folder / "base", folder / "reward"
    checkpoint = own / "checkpoint-7"
    checkpoint.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_qwen(base)
        peft = _reward_model(base)
    state = {key if new_keys else _old_key(key): value for key, value in peft.state_dict().items()}
    if whole:
        torch.save(state, checkpoint / "model.pth")
    else:
        from safetensors.torch import save_file

        loras = {key: value for key, value in state.items() if ".lora_" in key}
        save_file(
            {key.replace(".default", ""): value.contiguous() for key, value in loras.items()},
            checkpoint / "adapter_model.safetensors",
        )
        rest = {key: value for key, value in state.items() if "rm_head" in key or "embed_tokens" in key}
        torch.save(rest, checkpoint / "non_lora_state_dict.pth")
    data = {
        "fps": 2.0,
        "max_frame_pixels": 200704,
        "prompt_template_type": "detailed_special",
        "sample_type": "uniform",
    }
    settings = {
        "data_config": data,
        "model_config": {"model_name_or_path": str(base), "output_dim": 1, "reward_token": "special"},
        "peft_lora_config": {"lora_r": RANK, "lora_alpha": ALPHA},
        "inference_config": STATISTICS,
    }
    (own / "model_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (own / "prompt_template.txt").write_text(TEMPLATE, encoding="utf-8")
    return VideoAlignModel(base, own, peft)


def _old_key(key: str) -> str:
    """The name that transformers before 4.52 gave it."""
    key = key.replace("base_model.model.model.visual.", "base_model.model.visual.")
    return key.replace("base_model.model.model.language_model.", "base_model.model.model.")


def _reward_model(base: Path) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2VLForConditionalGeneration

    model = Qwen2VLForConditionalGeneration.from_pretrained(base)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(REWARD_TOKENS)})
    model.resize_token_embeddings(len(tokenizer))
    model.rm_head = nn.Linear(16, 1, bias=False)
    targets = r".*language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)).eval()
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:  # zero at the start of training
            nn.init.normal_(parameter, std=0.3)
    return peft


def save_qwen(folder: Path) -> None:
    """A Qwen2-VL base folder: config, safetensors under the older names, tokenizer with its chat template."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    number = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    config = {  # flat, as the released folders have it
        "model_type": "qwen2_vl",
        "vocab_size": len(tokenizer) + 9,  # Qwen2-VL's table, too, has more rows than its tokenizer has tokens
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "video_token_id": number,
        "image_token_id": number + 5,
        "vision_config": {
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 16,
            "num_heads": 2,
            "mlp_ratio": 2,
            "in_chans": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "initializer_range": 0.3,
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def byte_tokenizer() -> Any:
    """One token a byte, with Qwen's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in QWEN_TOKENS])
    return Qwen2Tokenizer(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="right",
        chat_template=CHAT,
    )


def save_clip(folder: Path, legacy: bool = False) -> None:
    """A CLIP folder: safetensors and today's processor files, or pytorch_model.bin and CLIPFeatureExtractor's."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    folder.mkdir(parents=True)
    vocabulary, merges = _clip_vocabulary()
    text = {"vocab_size": len(vocabulary), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 77, "bos_token_id": len(vocabulary) - 2}
    text |= {"eos_token_id": len(vocabulary) - 1, "pad_token_id": len(vocabulary) - 1}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8, initializer_factor=5.0)
        model = CLIPModel(config)
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=merges)
    if legacy:
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
        (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in merges))
        processor = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 32, "crop_size": 32, "resample": 3}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    else:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
        CLIPImageProcessorPil(**size).save_pretrained(folder)


def _clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes, bytes that end a word, two merges, start and end of text."""
    from tokenizers import pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("r", "e"), ("re", "d</w>")]
    words = [*symbols, *(f"{symbol}</w>" for symbol in symbols), *("".join(pair) for pair in merges)]
    return {word: index for index, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}, merges
