"""Small encoders of `transformers` with each head, of every family that is read."""

from pathlib import Path
from typing import Any

import torch
from tiny_models import save_tiny
from torch import Tensor

VOCAB, LENGTH = 60, 24

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
DISTILBERT = {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "pad_token_id": 0}
ROBERTA = {**SIZES, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
THREE_LABELS = {"id2label": {0: "yes", 1: "no", 2: "perhaps"}}
LABEL_HEADS = ("SequenceClassification", "TokenClassification")

CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": SIZES,
    "Roberta": ROBERTA,
    "XLMRoberta": {**ROBERTA, "pad_token_id": 3},
    "DistilBert": DISTILBERT,
    "Longformer": {**ROBERTA, "attention_window": 8},
    "BigBird": {**SIZES, "block_size": 4, "num_random_blocks": 1},
}
HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
OTHER_HEADS = {"XLMRoberta": HEADS[:1], "BigBird": HEADS[:3]}

CASES: dict[str, dict[str, Any]] = {
    f"{name}For{head}": {**config, **(THREE_LABELS if head in LABEL_HEADS else {})}
    for name, config in CONFIGS.items()
    for head in OTHER_HEADS.get(name, HEADS)
} | {"BertForPreTraining": {**SIZES, "hidden_act": "gelu_new"}}
"""The settings of each class."""


def save_encoder(name: str, folder: Path) -> Any:
    """The model of a class, saved in a folder."""
    return save_tiny(folder, name, CASES[name])


def their_output(model: Any, tokens: Tensor, is_token: Tensor, **options: Tensor) -> Tensor:
    """The scores (b, l, v) of tokens, or (b, v) of rows; those of both ends of a span are the last axis."""
    with torch.no_grad():
        output = model(tokens, attention_mask=is_token.long(), **options)
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    logits: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits
    return logits
