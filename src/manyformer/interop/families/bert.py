"""BERT (Devlin et al. 2019), RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, and the recipe `bert`."""

from collections.abc import Mapping
from typing import Any

from manyformer.interop import model_family as rules
from manyformer.interop.families.encoder_parts import (
    BERT_NAMES,
    ROBERTA_HEADS,
    EncoderNames,
    activation,
    bert_rules,
    encoder_family,
    head_rule,
    read_head,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import ConfigRule, Keywords

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


def _read_distilbert_head(config: ForeignConfig) -> Keywords:
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
