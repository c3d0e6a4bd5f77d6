"""Longformer (Beltagy et al. 2020) and the recipe `longformer`."""

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
from manyformer.interop.tensor_rules import PARAMETERS, TensorRule, each_parameter, stacked

NAMES = BERT_NAMES._replace(prefix="longformer.", **ROBERTA_HEADS)

GLOBAL_FIRST_TOKEN = "classification"
"""The head for which the first token is global where a call does not mark others."""


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    config.require("hidden_act", expected="gelu", default="gelu")
    keywords = bert_keywords(config, first_position=config.whole_number("pad_token_id", 1) + 1)
    return {
        **keywords,
        "window": _window(config, keywords["depth"]),
        "global_tokens": 1 if keywords["head"] == GLOBAL_FIRST_TOKEN else None,
    }


def _window(config: ForeignConfig, depth: int) -> int:
    """The window on each side of a token; theirs are of both sides, one for each layer."""
    widths = config.content.get("attention_window", 512)
    widths = widths if isinstance(widths, list) else [widths] * depth
    if len(widths) != depth or any(type(width) is not int or width < 2 or width % 2 for width in widths):
        raise UserError(f"{config.file}: attention_window ({widths!r:.60}) must be an even number for each layer")
    if len(set(widths)) > 1:
        raise UserError(
            f"{config.file}: attention_window ({widths!r:.60}) differs from layer to layer, and no recipe has that"
        )
    return int(widths[0]) // 2


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    yield from encoder_rules(NAMES, keywords, first_position=keywords[PAD_ID] + 1)
    for layer in range(keywords["depth"]):
        theirs, ours = f"longformer.encoder.layer.{layer}.attention.self", f"body.{layer}.attention.inner"
        yield from each_parameter(f"{theirs}.query_global", f"{ours}.global_q_proj")
        for kind in PARAMETERS:
            pair = [f"{theirs}.{name}_global.{kind}" for name in ("key", "value")]
            yield stacked(pair, f"{ours}.global_kv_proj.{kind}", [keywords["dim"]] * 2)


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    expected = 1 if keywords["head"] == GLOBAL_FIRST_TOKEN else None
    if keywords["global_tokens"] != expected:
        raise UserError(
            f"global_tokens is {keywords['global_tokens']}, and a Longformer with head={keywords['head']} has "
            f"{expected or 'none but those that a call marks'}: load it with keywords={{'global_tokens': {expected}}}"
        )
    return {
        **bert_config(keywords, class_prefix="Longformer", first_position=keywords[PAD_ID] + 1),
        "model_type": "longformer",
        "attention_window": [2 * keywords["window"]] * keywords["depth"],
        "hidden_act": "gelu",
        "pad_token_id": keywords[PAD_ID],
    }


LONGFORMER = ModelFamily(
    title="Longformer",
    model_types=("longformer",),
    recipe="longformer",
    prefix="longformer.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    head_is_optional=True,
    left_out={
        r"longformer\.pooler\.dense\.(weight|bias)": "a dense layer that no head of Longformer uses",
        **derived_tensors(NAMES),
    },
)
"""Tokens are global where `roles` is 1, what `transformers` calls `global_attention_mask`."""
