"""BigBird (Zaheer et al. 2020) and the recipe `bigbird`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.families.bert import ACTIVATION_NAMES, ACTIVATIONS
from manyformer.interop.families.encoder_parts import (
    BERT_NAMES,
    HEAD_OF_SUFFIX,
    SUFFIX_OF_HEAD,
    bert_keywords,
    derived_tensors,
    encoder_config,
    encoder_rules,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule

NAMES = BERT_NAMES._replace(text_labels=("classifier.dense", "classifier.out_proj"))
HEADS = {suffix: head for suffix, head in HEAD_OF_SUFFIX.items() if head != "answer-spans"}
"""The head for answers has a feed-forward layer of its own."""


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    for name, expected in {"use_bias": True, "rescale_embeddings": False}.items():
        config.require(name, expected=expected, default=expected)
    keywords = bert_keywords(config, heads=HEADS)
    activation = ACTIVATIONS[config.choice("hidden_act", "gelu_new", ACTIVATIONS)]
    block, random = config.size("block_size", 64), config.whole_number("num_random_blocks", 3)
    attention = config.choice("attention_type", "block_sparse", ("block_sparse", "original_full"))
    is_text_head = keywords["head"] == "classification"
    return {
        **keywords,
        "block": block,
        "random": random or None,
        "activation": activation,
        "full_length": _full_length(block, random) if attention == "block_sparse" else keywords["max_length"],
        **({"pooler_activation": activation} if is_text_head else {}),
    }


def _full_length(block: int, random: int) -> int:
    """The longest text to which the class attends fully."""
    return (5 + 2 * random) * block


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    return encoder_rules(NAMES, keywords)


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    head, block, random = keywords["head"], keywords["block"], keywords["random"] or 0
    if head not in SUFFIX_OF_HEAD or head == "answer-spans":
        raise UserError(f"head is {head}, and that of a BigBird has a feed-forward layer of its own")
    if head in ("classification", "sentence-pairs") and keywords["pooler_activation"] != keywords["activation"]:
        raise UserError(
            f"pooler_activation is {keywords['pooler_activation']}, and a BigBird has activation "
            f"({keywords['activation']}) there too"
        )
    length = keywords["full_length"]
    is_full = length is not None and length >= keywords["max_length"]
    if not is_full and length != _full_length(block, random):
        raise UserError(
            f"full_length is {length}, and a BigBird attends fully to texts of (5 + 2 random) block = "
            f"{_full_length(block, random)} tokens: load the model with keywords={{'full_length': "
            f"{_full_length(block, random)}}}"
        )
    return {
        **encoder_config(keywords, class_prefix="BigBird"),
        "model_type": "big_bird",
        "attention_type": "original_full" if is_full else "block_sparse",
        "block_size": block,
        "num_random_blocks": random,
        "hidden_act": ACTIVATION_NAMES[keywords["activation"]],
    }


BIGBIRD = ModelFamily(
    title="BigBird",
    model_types=("big_bird",),
    recipe="bigbird",
    prefix="bert.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    head_is_optional=True,
    left_out={
        r"bert\.pooler\.(weight|bias)": "a dense layer that no head of the recipe uses",
        r"cls\.seq_relationship\.(weight|bias)": "the head of the next-sentence task, which the recipe does not have",
        **derived_tensors(NAMES),
    },
)
"""Longer texts differ on purpose: the class draws no random blocks in evaluation, and its last block is global."""
