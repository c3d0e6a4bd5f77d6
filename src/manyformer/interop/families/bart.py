"""BART (Lewis et al. 2020), mBART, Marian, Pegasus, and the recipe `transformer`."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from manyformer.errors import UserError
from manyformer.interop import model_family as rules
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import (
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    attention_projections,
    each_module,
    each_parameter,
    padded_rows,
    reshaped,
    same,
)

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "silu": "silu",
    "swish": "silu",
}
UNUSED_POSITIONS = 2
"""Rows of BART's table of positions before that of the first token."""


class ForeignForm(NamedTuple):
    """What tells the classes apart: their name, and the keywords that are fixed in their code."""

    architecture: str
    fixed: Mapping[str, Any]


FORMS = {
    "bart": ForeignForm(
        "BartForConditionalGeneration", {"position": "learned", "embedding_norm": True, "norm_order": "post"}
    ),
    "mbart": ForeignForm(
        "MBartForConditionalGeneration", {"position": "learned", "embedding_norm": True, "norm_order": "pre"}
    ),
    "marian": ForeignForm(
        "MarianMTModel", {"position": "sinusoid-halves", "embedding_norm": False, "norm_order": "post"}
    ),
    "pegasus": ForeignForm(
        "PegasusForConditionalGeneration", {"position": "sinusoid-halves", "embedding_norm": False, "norm_order": "pre"}
    ),
}


def _read_form(config: ForeignConfig) -> Keywords:
    heads = config.size("encoder_attention_heads", 16)
    config.require("decoder_attention_heads", expected=heads, default=16)
    return {"output_bias": "final_logits_bias" in config.tensors, **FORMS[config.model_type].fixed}


def _write_form(keywords: Mapping[str, Any]) -> Keywords:
    for name in ("kernel", "encoder_kernel", "decoder_kernel", "cross_kernel"):
        if keywords[name] not in ("softmax", None):
            raise UserError(f"{name} is {keywords[name]}, and encoder-decoders of transformers have softmax alone")
    model_type = _model_type(keywords)
    fields = {"model_type": model_type, "architectures": [FORMS[model_type].architecture]}
    return {**fields, "decoder_attention_heads": keywords["heads"]}


def _model_type(keywords: Mapping[str, Any]) -> str:
    """The type of the models that have these keywords. Raises UserError if there are none."""
    for model_type, form in FORMS.items():
        if all(keywords[name] == value for name, value in form.fixed.items()):
            return model_type
    chosen = ", ".join(f"{name}={keywords[name]}" for name in FORMS["bart"].fixed)
    raise UserError(
        f"no class of transformers has {chosen}: BART and mBART have learned positions with a norm of the embedding, "
        "Marian and Pegasus position=sinusoid-halves without one"
    )


def _read_vocabularies(config: ForeignConfig) -> Keywords:
    vocab = config.size("vocab_size", 50265)
    if config.flag("share_encoder_decoder_embeddings", default=True):
        return {"vocab": vocab, "source_vocab": None}
    return {"vocab": config.size("decoder_vocab_size", vocab), "source_vocab": vocab}


def _write_vocabularies(keywords: Mapping[str, Any]) -> Keywords:
    vocab = keywords["vocab"]
    source_vocab = keywords["source_vocab"]
    model_type = _model_type(keywords)
    fields: Keywords = {"vocab_size": source_vocab or vocab}
    if model_type == "marian":
        return {**fields, "decoder_vocab_size": vocab, "share_encoder_decoder_embeddings": source_vocab is None}
    if source_vocab is not None:
        raise UserError(f"source_vocab is {source_vocab}, and a {FORMS[model_type].architecture} has one vocabulary")
    return fields


def _decoder_depth(keywords: Mapping[str, Any]) -> int:
    return int(keywords["decoder_depth"] or keywords["depth"])


def _tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    vocab = keywords["vocab"]
    dim = keywords["dim"]
    is_learned = keywords["position"] == "learned"
    if keywords["source_vocab"] is None:
        yield same("model.shared.weight", "embed_target.token.weight")
    else:
        yield same("model.encoder.embed_tokens.weight", "embed_source.token.weight")
        yield same("model.decoder.embed_tokens.weight", "embed_target.token.weight")
    if keywords["output_bias"]:
        yield reshaped("final_logits_bias", "head.bias", (1, vocab), (vocab,))
    for side, embed in {"encoder": "embed_source", "decoder": "embed_target"}.items():
        theirs = f"model.{side}"
        if is_learned:
            table = f"{theirs}.embed_positions.weight"
            yield padded_rows(table, f"{embed}.position.weight", UNUSED_POSITIONS)
        if keywords["embedding_norm"]:
            yield from each_parameter(f"{theirs}.layernorm_embedding", f"{embed}.norm")
        if keywords["norm_order"] == "pre":
            yield from each_parameter(f"{theirs}.layer_norm", f"{side}.norm.inner")
        if side == "decoder":
            depth = _decoder_depth(keywords)
        else:
            depth = keywords["depth"]
        for layer in range(depth):
            yield from _layer_rules(
                f"{theirs}.layers.{layer}", f"{side}.{layer}", dim, f"{keywords['norm_order']}_norm"
            )


def _layer_rules(theirs: str, ours: str, dim: int, norm: str) -> Iterator[TensorRule]:
    branches = {"self_attn": "attention"} | ({"encoder_attn": "cross"} if ours.startswith("decoder") else {})
    for name, branch in branches.items():
        projections = [f"{theirs}.{name}.{part}_proj" for part in ("q", "k", "v", "out")]
        yield from attention_projections(projections, f"{ours}.{branch}.inner", [dim, dim])
        yield from each_parameter(f"{theirs}.{name}_layer_norm", f"{ours}.{branch}.{norm}")
    yield from each_module(theirs, f"{ours}.ff", {"fc1": "inner.up", "fc2": "inner.down", "final_layer_norm": norm})


BART = ModelFamily(
    title="BART",
    model_types=tuple(FORMS),
    recipe="transformer",
    prefix="model.",
    config_rules=(
        ConfigRule(_read_form, _write_form),
        ConfigRule(_read_vocabularies, _write_vocabularies),
        rules.written(is_encoder_decoder=True),
        rules.fixed(tie_word_embeddings=True),
        rules.size("d_model", "dim", 1024),
        rules.size("encoder_layers", "depth", 12),
        rules.setting(
            "decoder_layers", "decoder_depth", lambda config: config.size("decoder_layers", 12), _decoder_depth
        ),
        rules.size("encoder_attention_heads", "heads", 16),
        rules.size("encoder_ffn_dim", "ff_dim", 4096),
        rules.setting(
            "decoder_ffn_dim",
            "decoder_ff_dim",
            lambda config: config.size("decoder_ffn_dim", 4096),
            lambda keywords: keywords["decoder_ff_dim"] or keywords["ff_dim"],
        ),
        rules.size("max_position_embeddings", "max_length", 1024),
        rules.number("dropout", "dropout", 0.1),
        rules.copied("attention_dropout", "attention_dropout"),
        rules.choice("activation_function", "activation", "gelu", ACTIVATIONS),
        rules.flag("scale_embedding", "scaled_embedding", default=False),
    ),
    tensor_rules=_tensor_rules,
    left_out={
        r"lm_head\.weight|model\.(encoder|decoder)\.embed_tokens\.weight": "a copy of the embedding",
        r"model\.(encoder|decoder)\.embed_positions\.weight": "sines and cosines, which are computed",
    },
)
"""Positions of BART and mBART begin with row 2 of their tables; norms are after branches in BART and Marian."""

FAMILIES = (BART,)
