"""What the families of encoders like BERT share: the rules of their tensors, and which head an architecture has."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from manyformer.errors import UserError
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords
from manyformer.interop.tensor_rules import PARAMETERS, TensorRule, each_parameter, padded_rows, same, stacked, unused

HEAD_OF_SUFFIX = {
    "ForMaskedLM": "masked-lm",
    "ForPreTraining": "masked-lm",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tagging",
    "ForQuestionAnswering": "answer-spans",
}
"""From the end of the name of an architecture to the head that it has; the first of each head is written."""

IMAGE_HEAD_OF_SUFFIX = dict.fromkeys(
    ("ForImageClassification", "ForImageClassificationWithTeacher"), "image-classification"
)
"""The same for images."""

SUFFIX_OF_HEAD = {
    **{head: suffix for suffix, head in reversed(HEAD_OF_SUFFIX.items())},
    "sentence-pairs": "ForSequenceClassification",
}

WITH_LABELS = {"classification", "sentence-pairs", "tagging", "image-classification"}
"""The heads that have labels."""


class EncoderNames(NamedTuple):
    """The names that a family of encoders like BERT gives to its modules.

    Those of layers and embeddings are below `prefix`; those of heads are complete. `attention` are the projections of
    queries, keys, values and outputs; `masked_lm` the dense layer, the norm and the module with the bias;
    `text_labels` the dense layer and the projection; `token_labels` and `spans` a projection. `has_token_types` says
    whether there is a table of types of tokens."""

    prefix: str
    layers: str
    attention: tuple[str, str, str, str]
    attention_norm: str
    up: str
    down: str
    ff_norm: str
    masked_lm: tuple[str, str, str]
    text_labels: tuple[str, str]
    token_labels: str = "classifier"
    spans: str = "qa_outputs"
    has_token_types: bool = True


BERT_NAMES = EncoderNames(
    prefix="bert.",
    layers="encoder.layer",
    attention=("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    ff_norm="output.LayerNorm",
    masked_lm=("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"),
    text_labels=("bert.pooler.dense", "classifier"),
)

ROBERTA_HEADS: dict[str, Any] = {
    "masked_lm": ("lm_head.dense", "lm_head.layer_norm", "lm_head"),
    "text_labels": ("classifier.dense", "classifier.out_proj"),
}
"""The heads of RoBERTa and of the families that begin with its weights."""


def encoder_rules(names: EncoderNames, keywords: Mapping[str, Any], *, first_position: int = 0) -> Iterator[TensorRule]:
    """The rules of a post-norm encoder with a head; their positions are numbered from `first_position`."""
    embeddings, dim = f"{names.prefix}embeddings", keywords["dim"]
    yield same(f"{embeddings}.word_embeddings.weight", "embed.token.weight")
    yield padded_rows(f"{embeddings}.position_embeddings.weight", "embed.position.weight", first_position)
    if names.has_token_types:
        yield _token_types(f"{embeddings}.token_type_embeddings.weight", keywords)
    yield from each_parameter(f"{embeddings}.LayerNorm", "embed.norm")
    for layer in range(keywords["depth"]):
        theirs, ours = f"{names.prefix}{names.layers}.{layer}", f"body.{layer}"
        query, key, value, output = (f"{theirs}.{name}" for name in names.attention)
        yield from each_parameter(query, f"{ours}.attention.inner.q_proj")
        for kind in PARAMETERS:
            yield stacked([f"{key}.{kind}", f"{value}.{kind}"], f"{ours}.attention.inner.kv_proj.{kind}", [dim, dim])
        yield from each_parameter(output, f"{ours}.attention.inner.out_proj")
        yield from each_parameter(f"{theirs}.{names.attention_norm}", f"{ours}.attention.post_norm")
        yield from each_parameter(f"{theirs}.{names.up}", f"{ours}.ff.inner.up")
        yield from each_parameter(f"{theirs}.{names.down}", f"{ours}.ff.inner.down")
        yield from each_parameter(f"{theirs}.{names.ff_norm}", f"{ours}.ff.post_norm")
    yield from _head_rules(names, keywords["head"])


def _token_types(theirs: str, keywords: Mapping[str, Any]) -> TensorRule:
    """The vectors of sentences; where a model of ours has none, the two of theirs are 0."""
    if keywords["sentence_types"] is None:
        return unused(theirs, (2, keywords["dim"]))
    return same(theirs, "embed.types.weight")


def _head_rules(names: EncoderNames, head: str) -> Iterator[TensorRule]:
    if head == "masked-lm":
        dense, norm, output = names.masked_lm
        yield from each_parameter(dense, "head.transform.0")
        yield from each_parameter(norm, "head.transform.2")
        yield same(f"{output}.bias", "head.bias")
    elif head in ("classification", "sentence-pairs"):
        dense, output = names.text_labels
        yield from each_parameter(dense, "head.transform.0")
        yield from each_parameter(output, "head")
    else:
        yield from each_parameter(names.token_labels if head == "tagging" else names.spans, "head")


def derived_tensors(names: EncoderNames) -> dict[str, str]:
    """Patterns of the names of tensors that follow from others, in files of all families, with the reason for each."""
    output, embeddings = re.escape(names.masked_lm[-1]), re.escape(f"{names.prefix}embeddings")
    return {
        rf"{output}\.decoder\.(weight|bias)": "a copy of the embedding and of the bias",
        rf"{embeddings}\.position_ids": "the numbers of positions, which older versions stored",
    }


def read_head(config: ForeignConfig, head_of_suffix: Mapping[str, str] = HEAD_OF_SUFFIX) -> Keywords:
    """The keywords of the head that the architecture of a config has, among those of the recipe.

    A model without a head gets the first of these. Raises UserError for another head, and for scores that are no
    probabilities of labels."""
    architecture, suffixes = config.architecture, dict(head_of_suffix)
    if config.is_bare:
        suffixes = {"Model": next(iter(head_of_suffix.values()))}
    head = next((head for suffix, head in suffixes.items() if architecture.endswith(suffix)), None)
    if head is None:
        known = ", ".join(f"...{suffix}" for suffix in head_of_suffix)
        raise UserError(
            f"{config.file}: architectures is {architecture!r:.60}, which has no head that the recipe has: {known}"
        )
    if head not in WITH_LABELS:
        return {"head": head}
    problem = config.content.get("problem_type")
    if problem not in (None, "single_label_classification"):
        raise UserError(f"{config.file}: problem_type is {problem!r:.60}, and heads of our recipes choose one label")
    return {"head": head, "classes": len(config.labels())}


def bert_keywords(
    config: ForeignConfig, *, first_position: int = 0, heads: Mapping[str, str] = HEAD_OF_SUFFIX
) -> Keywords:
    """The keywords of a BERT, and of a family with its fields, whose positions are numbered from `first_position`."""
    for name, expected in {
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    }.items():
        config.require(name, expected=expected, default=expected)
    return {
        "vocab": config.size("vocab_size"),
        "dim": config.size("hidden_size", 768),
        "depth": config.size("num_hidden_layers", 12),
        "heads": config.size("num_attention_heads", 12),
        "ff_dim": config.size("intermediate_size", 3072),
        "max_length": config.size("max_position_embeddings", 512) - first_position,
        "sentence_types": config.size("type_vocab_size", 2),
        "dropout": config.number("hidden_dropout_prob", 0.1),
        "norm_eps": config.number("layer_norm_eps", 1e-12),
        **read_head(config, heads),
    }


def bert_config(keywords: Mapping[str, Any], *, class_prefix: str, first_position: int = 0) -> Keywords:
    """The config of a BERT, or of a family with its fields and names of classes that begin with `class_prefix`.

    Raises UserError for a head whose dense layer has another activation than tanh."""
    if keywords["pooler_activation"] != "tanh":
        raise UserError(f"pooler_activation is {keywords['pooler_activation']}, and a {class_prefix} has tanh alone")
    return encoder_config(keywords, class_prefix=class_prefix, first_position=first_position)


def encoder_config(keywords: Mapping[str, Any], *, class_prefix: str, first_position: int = 0) -> Keywords:
    """The config of an encoder with the fields of a BERT, whatever the activation in its head."""
    return {
        "architectures": [f"{class_prefix}{SUFFIX_OF_HEAD[keywords['head']]}"],
        "vocab_size": keywords["vocab"],
        "hidden_size": keywords["dim"],
        "num_hidden_layers": keywords["depth"],
        "num_attention_heads": keywords["heads"],
        "intermediate_size": keywords["ff_dim"],
        "max_position_embeddings": keywords["max_length"] + first_position,
        "type_vocab_size": keywords.get("sentence_types") or 2,
        "hidden_dropout_prob": keywords["dropout"],
        "attention_probs_dropout_prob": keywords["attention_dropout"],
        "layer_norm_eps": keywords["norm_eps"],
        "tie_word_embeddings": True,
    }
