"""DistilBERT (Sanh et al. 2019) and the recipe `bert`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.families.bert import ACTIVATION_NAMES, ACTIVATIONS
from manyformer.interop.families.encoder_parts import SUFFIX_OF_HEAD, EncoderNames, encoder_rules, read_head
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule

NAMES = EncoderNames(
    prefix="distilbert.",
    layers="transformer.layer",
    attention=("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    ff_norm="output_layer_norm",
    masked_lm=("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    text_labels=("pre_classifier", "classifier"),
    has_token_types=False,
)

NORM_EPS = 1e-12
"""The epsilon of all norms, which is no setting."""


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    config.require("tie_word_embeddings", expected=True, default=True)
    head = read_head(config)
    return {
        "vocab": config.size("vocab_size", 30522),
        "dim": config.size("dim", 768),
        "depth": config.size("n_layers", 6),
        "heads": config.size("n_heads", 12),
        "ff_dim": config.size("hidden_dim", 3072),
        "max_length": config.size("max_position_embeddings", 512),
        "dropout": config.number("dropout", 0.1),
        "norm_eps": NORM_EPS,
        "activation": ACTIVATIONS[config.choice("activation", "gelu", ACTIVATIONS)],
        **head,
        **({"pooler_activation": "relu"} if head["head"] == "classification" else {}),
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    return encoder_rules(NAMES, keywords)


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    is_text_head = keywords["head"] in ("classification", "sentence-pairs")
    required = {"sentence_types": None, "norm_eps": NORM_EPS, **({"pooler_activation": "relu"} if is_text_head else {})}
    for name, expected in required.items():
        if keywords[name] != expected:
            raise UserError(f"{name} is {keywords[name]}, and a DistilBERT has {expected} alone")
    return {
        "architectures": [f"DistilBert{SUFFIX_OF_HEAD[keywords['head']]}"],
        "model_type": "distilbert",
        "vocab_size": keywords["vocab"],
        "dim": keywords["dim"],
        "n_layers": keywords["depth"],
        "n_heads": keywords["heads"],
        "hidden_dim": keywords["ff_dim"],
        "max_position_embeddings": keywords["max_length"],
        "dropout": keywords["dropout"],
        "attention_dropout": keywords["attention_dropout"],
        "activation": ACTIVATION_NAMES[keywords["activation"]],
        "tie_word_embeddings": True,
    }


DISTILBERT = ModelFamily(
    title="DistilBERT",
    model_types=("distilbert",),
    recipe="bert",
    prefix="distilbert.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    head_is_optional=True,
    left_out={
        r"vocab_projector\.weight": "a copy of the embedding",
        r"distilbert\.embeddings\.position_ids": "the numbers of positions, which older versions stored",
    },
)
"""It has no sentence types, and a ReLU in the head for labels of texts."""
