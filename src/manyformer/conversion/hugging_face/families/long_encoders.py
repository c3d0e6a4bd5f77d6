"""Encoders like BERT with sparse attention, each with the recipe of its name: Longformer and BigBird.

Beltagy et al. 2020 and Zaheer et al. 2020."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    PARAMETERS,
    ConfigRule,
    Keywords,
    TensorRule,
    each_parameter,
    stacked,
)
from manyformer.conversion.hugging_face.families.bert import (
    BERT_NAMES,
    HEAD_OF_SUFFIX,
    ROBERTA_HEADS,
    SUFFIX_OF_HEAD,
    activation,
    bert_rules,
    encoder_family,
    head_rule,
    read_head,
)
from manyformer.conversion.hugging_face.hf_folder import HFConfig

GLOBAL_FIRST_TOKEN = "classification"
"""The head for which the first token is global where a call does not mark others."""


def _read_longformer_head(config: HFConfig) -> Keywords:
    head = read_head(config)
    return {**head, "global_tokens": 1 if head["head"] == GLOBAL_FIRST_TOKEN else None}


def _write_longformer_head(keywords: Mapping[str, Any]) -> Keywords:
    expected = None
    if keywords["head"] == GLOBAL_FIRST_TOKEN:
        expected = 1
    if keywords["global_tokens"] != expected:
        raise UserError(
            f"global_tokens is {keywords['global_tokens']}, and a Longformer with head={keywords['head']} has "
            f"{expected or 'none but those that a call marks'}: load it with keywords={{'global_tokens': {expected}}}"
        )
    return head_rule("Longformer").write(keywords)


def _longformer_window(config: HFConfig) -> int:
    """The window on each side of a token; the config has windows of both sides, one for each layer."""
    widths = config.content.get("attention_window", 512)
    depth = config.size("num_hidden_layers", 12)
    if not isinstance(widths, list):
        widths = [widths] * depth
    if len(widths) != depth or any(type(width) is not int or width < 2 or width % 2 for width in widths):
        raise UserError(f"{config.file}: attention_window ({widths!r:.60}) must be an even number for each layer")
    # published models have equal windows in all layers
    if len(set(widths)) > 1:
        raise UserError(
            f"{config.file}: attention_window ({widths!r:.60}) differs from layer to layer, and no recipe has that"
        )
    return int(widths[0]) // 2


def _longformer_layer(hf: str, ours: str, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    attention = f"{hf}.attention.self"
    inner = f"{ours}.attention.inner"
    # global tokens have projections of their own (section 3.1)
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
        *bert_rules("longformer", ConfigRule(_read_longformer_head, _write_longformer_head), after_padding=True),
        rules.fixed(hidden_act="gelu"),
        rules.setting(
            "attention_window",
            "window",
            _longformer_window,
            lambda keywords: [2 * keywords["window"]] * keywords["depth"],
        ),
    ),
    left_out={r"longformer\.pooler\.dense\.(weight|bias)": "a dense layer that no head of Longformer uses"},
    after_padding=True,
    layer=_longformer_layer,
)
"""Tokens are global where `roles` is 1, what `transformers` calls `global_attention_mask`."""


BIGBIRD_HEADS = {suffix: head for suffix, head in HEAD_OF_SUFFIX.items() if head != "answer-spans"}
"""The head for answers has a feed-forward layer of its own."""

BIGBIRD_ACTIVATION = activation("hidden_act", "gelu_new")


def _read_bigbird_head(config: HFConfig) -> Keywords:
    """The head, whose dense layer for labels of texts has the activation of the other layers."""
    head = read_head(config, BIGBIRD_HEADS)
    if head["head"] == "classification":
        head["pooler_activation"] = BIGBIRD_ACTIVATION.read(config)["activation"]
    return head


def _write_bigbird_head(keywords: Mapping[str, Any]) -> Keywords:
    head = keywords["head"]
    if head not in SUFFIX_OF_HEAD or head == "answer-spans":
        raise UserError(f"head is {head}, and that of a BigBird has a feed-forward layer of its own")
    if head in ("classification", "sentence-pairs") and keywords["pooler_activation"] != keywords["activation"]:
        raise UserError(
            f"pooler_activation is {keywords['pooler_activation']}, and a BigBird has activation "
            f"({keywords['activation']}) there too"
        )
    return head_rule("BigBird").write(keywords)


def _read_full_length(config: HFConfig) -> Keywords:
    attention = config.choice("attention_type", "block_sparse", ("block_sparse", "original_full"))
    block = config.size("block_size", 64)
    random = config.whole_number("num_random_blocks", 3)
    # the class itself turns to full attention for texts that its blocks would cover anyway
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
        *bert_rules("big_bird", ConfigRule(_read_bigbird_head, _write_bigbird_head)),
        BIGBIRD_ACTIVATION,
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

FAMILIES = (LONGFORMER, BIGBIRD)
