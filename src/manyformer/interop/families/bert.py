"""BERT (Devlin et al. 2019) and the recipe `bert`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.interop.families.encoder_parts import (
    BERT_NAMES,
    bert_config,
    bert_keywords,
    derived_tensors,
    encoder_rules,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu"}
"""From the names of activations to ours."""

ACTIVATION_NAMES = {"gelu": "gelu", "gelu-tanh": "gelu_new", "relu": "relu"}
"""From our names of activations to theirs."""


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    return {
        **bert_keywords(config),
        "activation": ACTIVATIONS[config.choice("hidden_act", "gelu", ACTIVATIONS)],
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    return encoder_rules(BERT_NAMES, keywords)


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    config = bert_config(keywords, class_prefix="Bert")
    return {**config, "model_type": "bert", "hidden_act": ACTIVATION_NAMES[keywords["activation"]]}


BERT = ModelFamily(
    title="BERT",
    model_types=("bert",),
    recipe="bert",
    prefix="bert.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    head_is_optional=True,
    left_out={
        r"bert\.pooler\.dense\.(weight|bias)": "the dense layer of a head for labels of texts",
        r"cls\.seq_relationship\.(weight|bias)": "the head of the next-sentence task, which the recipe does not have",
        **derived_tensors(BERT_NAMES),
    },
    old_names={r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
)
"""The head is that of the architecture; the recipe's rows of two sentences are BERT's token types."""
