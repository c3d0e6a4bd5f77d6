"""Longformer (Beltagy et al. 2020) and the recipe `longformer`."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop import model_family as rules
from manyformer.interop.families.encoder_parts import (
    BERT_NAMES,
    ROBERTA_HEADS,
    bert_rules,
    encoder_family,
    head_rule,
    read_head,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import PARAMETERS, ConfigRule, Keywords, TensorRule, each_parameter, stacked

GLOBAL_FIRST_TOKEN = "classification"
"""The head for which the first token is global where a call does not mark others."""


def _read_head(config: ForeignConfig) -> Keywords:
    head = read_head(config)
    return {**head, "global_tokens": 1 if head["head"] == GLOBAL_FIRST_TOKEN else None}


def _write_head(keywords: Mapping[str, Any]) -> Keywords:
    expected = None
    if keywords["head"] == GLOBAL_FIRST_TOKEN:
        expected = 1
    if keywords["global_tokens"] != expected:
        raise UserError(
            f"global_tokens is {keywords['global_tokens']}, and a Longformer with head={keywords['head']} has "
            f"{expected or 'none but those that a call marks'}: load it with keywords={{'global_tokens': {expected}}}"
        )
    return head_rule("Longformer").write(keywords)


def _window(config: ForeignConfig) -> int:
    """The window on each side of a token; theirs are of both sides, one for each layer."""
    widths = config.content.get("attention_window", 512)
    depth = config.size("num_hidden_layers", 12)
    if isinstance(widths, list):
        widths = widths
    else:
        widths = [widths] * depth
    if len(widths) != depth or any(type(width) is not int or width < 2 or width % 2 for width in widths):
        raise UserError(f"{config.file}: attention_window ({widths!r:.60}) must be an even number for each layer")
    if len(set(widths)) > 1:
        raise UserError(
            f"{config.file}: attention_window ({widths!r:.60}) differs from layer to layer, and no recipe has that"
        )
    return int(widths[0]) // 2


def _layer(theirs: str, ours: str, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    attention = f"{theirs}.attention.self"
    inner = f"{ours}.attention.inner"
    yield from each_parameter(f"{attention}.query_global", f"{inner}.global_q_proj")
    for kind in PARAMETERS:
        pair = [f"{attention}.{name}_global.{kind}" for name in ("key", "value")]
        yield stacked(pair, f"{inner}.global_kv_proj.{kind}", [keywords["dim"]] * 2)


LONGFORMER = encoder_family(
    title="Longformer",
    model_types=("longformer",),
    recipe="longformer",
    names=BERT_NAMES._replace(prefix="longformer.", **ROBERTA_HEADS),
    config_rules=(
        rules.demanded("a Longformer", pooler_activation="tanh"),
        *bert_rules("longformer", ConfigRule(_read_head, _write_head), after_padding=True),
        rules.fixed(hidden_act="gelu"),
        rules.setting(
            "attention_window", "window", _window, lambda keywords: [2 * keywords["window"]] * keywords["depth"]
        ),
    ),
    left_out={r"longformer\.pooler\.dense\.(weight|bias)": "a dense layer that no head of Longformer uses"},
    after_padding=True,
    layer=_layer,
)
"""Tokens are global where `roles` is 1, what `transformers` calls `global_attention_mask`."""

FAMILIES = (LONGFORMER,)
