"""Small encoder-decoders of `transformers`, of every family that is read."""

from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_model

VOCAB, LENGTH = 60, 24
BART_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
MARIAN_SIZES = {
    **BART_SIZES,
    "pad_token_id": 49,
    "eos_token_id": 0,
    "decoder_start_token_id": 49,
    "forced_eos_token_id": 0,
    "activation_function": "swish",
    "scale_embedding": True,
}
T5_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", {**BART_SIZES, "forced_bos_token_id": 0}),
    "bart-odd": (
        "BartForConditionalGeneration",
        {
            **BART_SIZES,
            "pad_token_id": 31,
            "bos_token_id": 17,
            "eos_token_id": 17,
            "decoder_start_token_id": 44,
            "forced_bos_token_id": 23,
            "forced_eos_token_id": 17,
        },
    ),
    "mbart": (
        "MBartForConditionalGeneration",
        {**BART_SIZES, "scale_embedding": True, "forced_bos_token_id": 7, "activation_function": "relu"},
    ),
    "marian": ("MarianMTModel", MARIAN_SIZES),
    "marian-two": (
        "MarianMTModel",
        {**MARIAN_SIZES, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 50},
    ),
    "pegasus": (
        "PegasusForConditionalGeneration",
        {**BART_SIZES, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1},
    ),
    "t5": ("T5ForConditionalGeneration", T5_SIZES),
    "t5-gated": ("T5ForConditionalGeneration", {**T5_SIZES, "feed_forward_proj": "gated-gelu"}),
    "t5-unscaled": (
        "T5ForConditionalGeneration",
        {**T5_SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5-untied": (
        "T5ForConditionalGeneration",
        {**T5_SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("MT5ForConditionalGeneration", {**T5_SIZES, "feed_forward_proj": "gated-gelu"}),
}
"""A class and its config, by the name of the case."""


def saved(case: str, folder: Path) -> Any:
    """The model of a case, saved in a folder."""
    name, settings = CASES[case]
    model = tiny_model(name, **settings)
    if case == "t5-untied":
        # as in published weights of T5 1.1, whose output is another matrix
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32))
    model.save_pretrained(folder)
    return model
