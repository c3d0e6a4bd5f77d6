"""BERT (Devlin et al. 2019), RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, and what other families of encoders share.

The recipe of these is `bert`. The first half has the settings, the heads and the tensors of any encoder like BERT."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    PAD_ID,
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    attention_projections,
    each_module,
    each_parameter,
    padded_rows,
    same,
    unused,
)
from manyformer.conversion.hugging_face.hf_folder import HFConfig

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

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu"}
"""From the names of activations to ours."""

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
    embeddings = f"{names.prefix}embeddings"
    dim = keywords["dim"]
    yield same(f"{embeddings}.word_embeddings.weight", "embed.token.weight")
    yield padded_rows(f"{embeddings}.position_embeddings.weight", "embed.position.weight", first_position)
    if names.has_token_types:
        yield _token_types(f"{embeddings}.token_type_embeddings.weight", keywords)
    yield from each_parameter(f"{embeddings}.LayerNorm", "embed.norm")
    for layer in range(keywords["depth"]):
        hf = f"{names.prefix}{names.layers}.{layer}"
        ours = f"body.{layer}"
        projections = [f"{hf}.{name}" for name in names.attention]
        yield from attention_projections(projections, f"{ours}.attention.inner", [dim, dim])
        modules = {
            names.attention_norm: "attention.post_norm",
            names.up: "ff.inner.up",
            names.down: "ff.inner.down",
            names.ff_norm: "ff.post_norm",
        }
        yield from each_module(hf, ours, modules)
    yield from _head_rules(names, keywords["head"])


def _token_types(hf: str, keywords: Mapping[str, Any]) -> TensorRule:
    """The vectors of sentences; where a model of ours has none, the two in the file are 0."""
    if keywords["sentence_types"] is None:
        return unused(hf, (2, keywords["dim"]))
    return same(hf, "embed.types.weight")


def _head_rules(names: EncoderNames, head: str) -> Iterator[TensorRule]:
    if head == "masked-lm":
        dense, norm, output = names.masked_lm
        yield from each_parameter(dense, "head.transform.0")
        yield from each_parameter(norm, "head.transform.2")
        # its matrix is the embedding
        yield same(f"{output}.bias", "head.bias")
    elif head in ("classification", "sentence-pairs"):
        dense, output = names.text_labels
        yield from each_parameter(dense, "head.transform.0")
        yield from each_parameter(output, "head")
    else:
        yield from each_parameter(names.token_labels if head == "tagging" else names.spans, "head")


def derived_tensors(names: EncoderNames) -> dict[str, str]:
    """Patterns of the names of tensors that follow from others, in files of all families, with the reason for each."""
    output = re.escape(names.masked_lm[-1])
    embeddings = re.escape(f"{names.prefix}embeddings")
    return {
        rf"{output}\.decoder\.(weight|bias)": "a copy of the embedding and of the bias",
        rf"{embeddings}\.position_ids": "the numbers of positions, which older versions stored",
    }


def read_head(config: HFConfig, head_of_suffix: Mapping[str, str] = HEAD_OF_SUFFIX) -> Keywords:
    """The keywords of the head that the architecture of a config has, among those of the recipe.

    A model without a head gets the first of these. Raises UserError for another head, and for scores that are no
    probabilities of labels."""
    architecture = config.architecture
    suffixes = dict(head_of_suffix)
    # without a head, any name that ends in Model will do: the head is new
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
    # several labels at once, or regression, would need another loss
    problem = config.content.get("problem_type")
    if problem not in (None, "single_label_classification"):
        raise UserError(f"{config.file}: problem_type is {problem!r:.60}, and heads of our recipes choose one label")
    return {"head": head, "classes": len(config.labels())}


def head_rule(class_prefix: str, head_of_suffix: Mapping[str, str] = HEAD_OF_SUFFIX) -> ConfigRule:
    """The head, which the architecture names; `class_prefix` begins the name."""
    return ConfigRule(
        lambda config: read_head(config, head_of_suffix),
        lambda keywords: {"architectures": [f"{class_prefix}{SUFFIX_OF_HEAD[keywords['head']]}"]},
    )


def activation(field: str, default: str = "gelu") -> ConfigRule:
    """The activation of feed-forward layers and of the head for masked tokens."""
    return rules.choice(field, "activation", default, ACTIVATIONS)


def bert_rules(model_type: str, head: ConfigRule, *, after_padding: bool = False) -> tuple[ConfigRule, ...]:
    """The settings of a BERT but for its activations, and of a family with its fields.

    Where positions are numbered `after_padding`, from the id of padding plus 1, the rows before them are left out."""
    positions: tuple[ConfigRule, ...] = (rules.size("max_position_embeddings", "max_length", 512),)
    if after_padding:
        length = rules.setting(
            "max_position_embeddings",
            "max_length",
            lambda config: config.size("max_position_embeddings", 512) - config.whole_number("pad_token_id", 1) - 1,
            lambda keywords: keywords["max_length"] + keywords[PAD_ID] + 1,
        )
        positions = (length, rules.copied("pad_token_id", PAD_ID))
    return (
        head,
        rules.written(model_type=model_type),
        rules.required(is_decoder=False, add_cross_attention=False, position_embedding_type="absolute"),
        rules.fixed(tie_word_embeddings=True),
        rules.size("vocab_size", "vocab"),
        rules.size("hidden_size", "dim", 768),
        rules.size("num_hidden_layers", "depth", 12),
        rules.size("num_attention_heads", "heads", 12),
        rules.size("intermediate_size", "ff_dim", 3072),
        *positions,
        rules.setting(
            "type_vocab_size",
            "sentence_types",
            lambda config: config.size("type_vocab_size", 2),
            lambda keywords: keywords.get("sentence_types") or 2,
        ),
        rules.number("hidden_dropout_prob", "dropout", 0.1),
        rules.copied("attention_probs_dropout_prob", "attention_dropout"),
        rules.number("layer_norm_eps", "norm_eps", 1e-12),
    )


def encoder_family(
    *,
    title: str,
    model_types: tuple[str, ...],
    recipe: str,
    names: EncoderNames,
    config_rules: Sequence[ConfigRule],
    left_out: Mapping[str, str],
    after_padding: bool = False,
    layer: Callable[[str, str, Mapping[str, Any]], Iterator[TensorRule]] | None = None,
    old_names: Mapping[str, str] | None = None,
) -> ModelFamily:
    """A family of encoders like BERT with these names of modules, whose positions may be numbered `after_padding`.

    `layer` makes the rules of tensors that a layer has besides BERT's, from its name there, its name here and the
    keywords; `left_out` and `old_names` are those of the family, besides what follows from other tensors in all."""

    def tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
        # RoBERTa numbers positions from the id of padding on, so that padding itself has a row
        first_position = keywords[PAD_ID] + 1 if after_padding else 0
        yield from encoder_rules(names, keywords, first_position=first_position)
        # what a layer has beyond BERT's, such as the projections of Longformer's global tokens
        for layer_number in range(keywords["depth"] if layer is not None else 0):
            assert layer is not None
            hf = f"{names.prefix}{names.layers}.{layer_number}"
            yield from layer(hf, f"body.{layer_number}", keywords)

    return ModelFamily(
        title=title,
        model_types=model_types,
        recipe=recipe,
        prefix=names.prefix,
        config_rules=config_rules,
        tensor_rules=tensor_rules,
        head_is_optional=True,
        left_out={**left_out, **derived_tensors(names)},
        old_names=old_names or {},
    )


BERT = encoder_family(
    title="BERT",
    model_types=("bert",),
    recipe="bert",
    names=BERT_NAMES,
    config_rules=(
        rules.demanded("a Bert", pooler_activation="tanh"),
        *bert_rules("bert", head_rule("Bert")),
        activation("hidden_act"),
    ),
    left_out={
        r"bert\.pooler\.dense\.(weight|bias)": "the dense layer of a head for labels of texts",
        r"cls\.seq_relationship\.(weight|bias)": "the head of the next-sentence task, which the recipe does not have",
    },
    old_names={r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
)
"""The head is that of the architecture; the recipe's rows of two sentences are BERT's token types."""

ROBERTA = encoder_family(
    title="RoBERTa",
    model_types=("roberta", "xlm-roberta", "camembert"),
    recipe="bert",
    names=BERT_NAMES._replace(prefix="roberta.", **ROBERTA_HEADS),
    config_rules=(
        rules.demanded("the head of a RoBERTa", activation="gelu"),
        rules.demanded("a Roberta", pooler_activation="tanh"),
        *bert_rules("roberta", head_rule("Roberta"), after_padding=True),
        rules.fixed(hidden_act="gelu"),
    ),
    left_out={r"roberta\.pooler\.dense\.(weight|bias)": "a dense layer that no head of RoBERTa uses"},
    after_padding=True,
)


def _read_distilbert_head(config: HFConfig) -> Keywords:
    """The head, with a ReLU in that for labels of texts."""
    head = read_head(config)
    if head["head"] == "classification":
        head["pooler_activation"] = "relu"
    return head


def _write_distilbert_head(keywords: Mapping[str, Any]) -> Keywords:
    values: Keywords = {"sentence_types": None, "norm_eps": DISTILBERT_NORM_EPS}
    if keywords["head"] in ("classification", "sentence-pairs"):
        values["pooler_activation"] = "relu"
    rules.demanded("a DistilBERT", **values).write(keywords)
    return head_rule("DistilBert").write(keywords)


DISTILBERT_NAMES = EncoderNames(
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
DISTILBERT_NORM_EPS = 1e-12
"""The epsilon of all its norms, which is no setting."""

DISTILBERT = encoder_family(
    title="DistilBERT",
    model_types=("distilbert",),
    recipe="bert",
    names=DISTILBERT_NAMES,
    config_rules=(
        ConfigRule(_read_distilbert_head, _write_distilbert_head),
        rules.written(model_type="distilbert"),
        rules.fixed(tie_word_embeddings=True),
        rules.implied(norm_eps=DISTILBERT_NORM_EPS),
        rules.size("vocab_size", "vocab", 30522),
        rules.size("dim", "dim", 768),
        rules.size("n_layers", "depth", 6),
        rules.size("n_heads", "heads", 12),
        rules.size("hidden_dim", "ff_dim", 3072),
        rules.size("max_position_embeddings", "max_length", 512),
        rules.number("dropout", "dropout", 0.1),
        rules.copied("attention_dropout", "attention_dropout"),
        activation("activation"),
    ),
    left_out={r"vocab_projector\.weight": "a copy of the embedding"},
)
"""It has no sentence types."""

FAMILIES = (BERT, ROBERTA, DISTILBERT)
