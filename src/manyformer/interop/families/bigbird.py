"""BigBird (Zaheer et al. 2020) and the recipe `bigbird`."""

from collections.abc import Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop import model_family as rules
from manyformer.interop.families.encoder_parts import (
    BERT_NAMES,
    HEAD_OF_SUFFIX,
    SUFFIX_OF_HEAD,
    activation,
    bert_rules,
    encoder_family,
    head_rule,
    read_head,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import ConfigRule, Keywords

HEADS = {suffix: head for suffix, head in HEAD_OF_SUFFIX.items() if head != "answer-spans"}
"""The head for answers has a feed-forward layer of its own."""

ACTIVATION = activation("hidden_act", "gelu_new")


def _read_head(config: ForeignConfig) -> Keywords:
    """The head, whose dense layer for labels of texts has the activation of the other layers."""
    head = read_head(config, HEADS)
    if head["head"] == "classification":
        head["pooler_activation"] = ACTIVATION.read(config)["activation"]
    return head


def _write_head(keywords: Mapping[str, Any]) -> Keywords:
    head = keywords["head"]
    if head not in SUFFIX_OF_HEAD or head == "answer-spans":
        raise UserError(f"head is {head}, and that of a BigBird has a feed-forward layer of its own")
    if head in ("classification", "sentence-pairs") and keywords["pooler_activation"] != keywords["activation"]:
        raise UserError(
            f"pooler_activation is {keywords['pooler_activation']}, and a BigBird has activation "
            f"({keywords['activation']}) there too"
        )
    return head_rule("BigBird").write(keywords)


def _read_full_length(config: ForeignConfig) -> Keywords:
    attention = config.choice("attention_type", "block_sparse", ("block_sparse", "original_full"))
    block = config.size("block_size", 64)
    random = config.whole_number("num_random_blocks", 3)
    length = _full_length(block, random)
    if attention == "original_full":
        length = config.size("max_position_embeddings", 512)
    return {"full_length": length}


def _write_full_length(keywords: Mapping[str, Any]) -> Keywords:
    length = keywords["full_length"]
    expected = _full_length(keywords["block"], keywords["random"] or 0)
    if length is not None and length >= keywords["max_length"]:
        return {"attention_type": "original_full"}
    if length != expected:
        raise UserError(
            f"full_length is {length}, and a BigBird attends fully to texts of (5 + 2 random) block = "
            f"{expected} tokens: load the model with keywords={{'full_length': {expected}}}"
        )
    return {"attention_type": "block_sparse"}


def _full_length(block: int, random: int) -> int:
    """The longest text to which the class attends fully."""
    return (5 + 2 * random) * block


BIGBIRD = encoder_family(
    title="BigBird",
    model_types=("big_bird",),
    recipe="bigbird",
    names=BERT_NAMES._replace(text_labels=("classifier.dense", "classifier.out_proj")),
    config_rules=(
        rules.required(use_bias=True, rescale_embeddings=False),
        *bert_rules("big_bird", ConfigRule(_read_head, _write_head)),
        ACTIVATION,
        rules.size("block_size", "block", 64),
        rules.setting(
            "num_random_blocks",
            "random",
            lambda config: config.whole_number("num_random_blocks", 3) or None,
            lambda keywords: keywords["random"] or 0,
        ),
        ConfigRule(_read_full_length, _write_full_length),
    ),
    left_out={
        r"bert\.pooler\.(weight|bias)": "a dense layer that no head of the recipe uses",
        r"cls\.seq_relationship\.(weight|bias)": "the head of the next-sentence task, which the recipe does not have",
    },
)
"""Longer texts differ on purpose: the class draws no random blocks in evaluation, and its last block is global."""

FAMILIES = (BIGBIRD,)
