"""A tiny Wan pipeline with random weights, in the real on-disk format and classes."""

from pathlib import Path
from typing import Any

import torch

WORDS = ["a", "red", "ball", "cat", "moving", "left", "snow", "the"]


def save_wan(folder: Path) -> Path:
    """2 blocks of width 24; the VAE's ratios are 8 (space) and 4 (time), patches are 2 x 2."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = _tokenizer()
        text = UMT5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        WanPipeline(
            tokenizer=tokenizer,
            text_encoder=UMT5EncoderModel(text),
            transformer=WanTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=4,
                out_channels=4,
                text_dim=16,
                freq_dim=16,
                ffn_dim=32,
                num_layers=2,
                rope_max_seq_len=32,
            ),
            vae=AutoencoderKLWan(
                base_dim=8,
                z_dim=4,
                dim_mult=[1, 1, 1, 1],
                num_res_blocks=1,
                latents_mean=[0.1, -0.2, 0.3, 0.0],
                latents_std=[1.5, 0.5, 2.0, 1.0],
            ),
            scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        ).save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    """Words, letters, and a score for each, as SentencePiece's unigram model has them."""
    from transformers import T5Tokenizer

    pieces = [f"\u2581{word}" for word in WORDS] + ["\u2581", *"abcdefghijklmnopqrstuvwxyz0123456789,.'\""]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + [
        (piece, -float(len(pieces) - 2 * len(piece))) for piece in pieces
    ]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)
