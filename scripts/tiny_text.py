"""The embedded checkpoint's tokenizers and text encoders, in the classes that HunyuanVideo15Pipeline names."""

import inspect

import torch
from diffusers import HunyuanVideo15Pipeline
from tiny_data import CAPTIONS
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

WIDTH = 64
SEED = 3
PREFIX_TOKENS = 108  # what the stock pipeline cuts off in front of a prompt
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def system_message() -> str:
    """What the pipeline puts before every prompt."""
    return inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default


def prefix_tokens(tokenizer: Qwen2Tokenizer) -> int:
    """How many tokens of the chat template come before the prompt's own."""
    chat = [{"role": "system", "content": system_message()}, {"role": "user", "content": "a circle"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    return len(tokenizer(text[: text.rindex("a circle")]).input_ids)


def build_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE with Qwen's pre-tokenization; every word of the captions and the system message is one token.

    Merging on until no pair is left gives the prefix exactly the tokens it has with Qwen's tokenizer.
    """
    untrained = Qwen2Tokenizer(padding_side="right", chat_template=CHAT_TEMPLATE, model_max_length=32768)
    texts = [str(caption) for caption in CAPTIONS] + [f"system\n{system_message()}", "user\n", "assistant\n"]
    tokenizer = untrained.train_new_from_iterator(
        texts,
        vocab_size=4096,
        new_special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    if prefix_tokens(tokenizer) != PREFIX_TOKENS:
        raise ValueError(f"the template's prefix has {prefix_tokens(tokenizer)} tokens, not {PREFIX_TOKENS}")
    return tokenizer


def build_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLTextModel:
    """A frozen random encoder, rounded to bfloat16 as it is stored.

    The pipeline reads the output of its first layer. The embeddings have standard deviation 1: with the usual 0.02
    the layer's output would drown the words.
    """
    torch.manual_seed(SEED)
    special = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    config = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        bos_token_id=special[0],
        eos_token_id=special[1],
        pad_token_id=special[0],
    )
    encoder = Qwen2_5_VLTextModel(config)
    torch.nn.init.normal_(encoder.embed_tokens.weight, std=1.0)
    return encoder.to(torch.bfloat16).float().eval()


def build_glyph_encoder() -> tuple[ByT5Tokenizer, T5EncoderModel]:
    """The encoder of quoted text, of zeros: the clips show no text."""
    tokenizer = ByT5Tokenizer()
    config = T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    encoder = T5EncoderModel(config).eval()
    for parameter in encoder.parameters():
        torch.nn.init.zeros_(parameter)
    return tokenizer, encoder


@torch.no_grad()
def encode_prompts(tokenizer: Qwen2Tokenizer, encoder: Qwen2_5_VLTextModel, prompts: list[str]) -> Tensor:
    """The pipeline's own embeddings [B, tokens, WIDTH] of prompts of equal length, without the padding."""
    embeddings, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
        encoder, tokenizer, prompts, torch.device("cpu"), tokenizer_max_length=32
    )
    lengths = mask.sum(1)
    if lengths.min() != lengths.max():
        raise ValueError(f"prompts of {int(lengths.min())} to {int(lengths.max())} tokens in one batch")
    return embeddings[:, : int(lengths[0])].clone()
