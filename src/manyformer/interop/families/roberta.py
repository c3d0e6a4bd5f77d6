"""RoBERTa (Liu et al. 2019), XLM-RoBERTa, CamemBERT, and the recipe `bert`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.families.encoder_parts import (
    BERT_NAMES,
    ROBERTA_HEADS,
    bert_config,
    bert_keywords,
    derived_tensors,
    encoder_rules,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import PAD_ID, Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule

NAMES = BERT_NAMES._replace(prefix="roberta.", **ROBERTA_HEADS)


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    config.require("hidden_act", expected="gelu", default="gelu")
    return bert_keywords(config, first_position=config.whole_number("pad_token_id", 1) + 1)


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    return encoder_rules(NAMES, keywords, first_position=keywords[PAD_ID] + 1)


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    if keywords["activation"] != "gelu":
        raise UserError(f"activation is {keywords['activation']}, and the head of a RoBERTa has gelu alone")
    config = bert_config(keywords, class_prefix="Roberta", first_position=keywords[PAD_ID] + 1)
    return {**config, "model_type": "roberta", "hidden_act": "gelu", "pad_token_id": keywords[PAD_ID]}


ROBERTA = ModelFamily(
    title="RoBERTa",
    model_types=("roberta", "xlm-roberta", "camembert"),
    recipe="bert",
    prefix="roberta.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    head_is_optional=True,
    left_out={
        r"roberta\.pooler\.dense\.(weight|bias)": "a dense layer that no head of RoBERTa uses",
        **derived_tensors(NAMES),
    },
)
"""Positions are numbered from the id of padding plus 1, and the rows before that are left out."""
