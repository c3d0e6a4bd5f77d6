"""BART (Lewis et al. 2020), mBART, Marian, Pegasus, and the recipe `transformer`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from manyformer.errors import UserError
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import (
    PARAMETERS,
    TensorRule,
    each_parameter,
    padded_rows,
    reshaped,
    same,
    stacked,
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

SOFTMAX_ATTENTION = {"kernel": "softmax", "encoder_kernel": None, "decoder_kernel": None, "cross_kernel": None}


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    heads = config.size("encoder_attention_heads", 16)
    config.require("decoder_attention_heads", expected=heads, default=16)
    config.require("tie_word_embeddings", expected=True, default=True)
    vocab, source_vocab = config.size("vocab_size", 50265), None
    if not config.flag("share_encoder_decoder_embeddings", default=True):
        vocab, source_vocab = config.size("decoder_vocab_size", vocab), vocab
    return {
        "vocab": vocab,
        "source_vocab": source_vocab,
        "dim": config.size("d_model", 1024),
        "depth": config.size("encoder_layers", 12),
        "decoder_depth": config.size("decoder_layers", 12),
        "heads": heads,
        "ff_dim": config.size("encoder_ffn_dim", 4096),
        "decoder_ff_dim": config.size("decoder_ffn_dim", 4096),
        "max_length": config.size("max_position_embeddings", 1024),
        "dropout": config.number("dropout", 0.1),
        "activation": ACTIVATIONS[config.choice("activation_function", "gelu", ACTIVATIONS)],
        "scaled_embedding": config.flag("scale_embedding", default=False),
        "output_bias": "final_logits_bias" in tensors,
        **FORMS[config.content["model_type"]].fixed,
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    vocab, dim, is_learned = keywords["vocab"], keywords["dim"], keywords["position"] == "learned"
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
        depth = (keywords["decoder_depth"] if side == "decoder" else None) or keywords["depth"]
        for layer in range(depth):
            yield from _layer_rules(
                f"{theirs}.layers.{layer}", f"{side}.{layer}", dim, f"{keywords['norm_order']}_norm"
            )


def _layer_rules(theirs: str, ours: str, dim: int, norm: str) -> Iterator[TensorRule]:
    branches = {"self_attn": "attention"} | ({"encoder_attn": "cross"} if ours.startswith("decoder") else {})
    for name, branch in branches.items():
        yield from each_parameter(f"{theirs}.{name}.q_proj", f"{ours}.{branch}.inner.q_proj")
        yield from each_parameter(f"{theirs}.{name}.out_proj", f"{ours}.{branch}.inner.out_proj")
        yield from each_parameter(f"{theirs}.{name}_layer_norm", f"{ours}.{branch}.{norm}")
        for kind in PARAMETERS:
            pair = [f"{theirs}.{name}.{part}.{kind}" for part in ("k_proj", "v_proj")]
            yield stacked(pair, f"{ours}.{branch}.inner.kv_proj.{kind}", [dim, dim])
    for name, part in {"fc1": "inner.up", "fc2": "inner.down", "final_layer_norm": norm}.items():
        yield from each_parameter(f"{theirs}.{name}", f"{ours}.ff.{part}")


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    for name, expected in SOFTMAX_ATTENTION.items():
        if keywords[name] not in (expected, "softmax"):
            raise UserError(f"{name} is {keywords[name]}, and encoder-decoders of transformers have softmax alone")
    model_type = _model_type(keywords)
    vocab, source_vocab = keywords["vocab"], keywords["source_vocab"]
    if source_vocab is not None and model_type != "marian":
        raise UserError(f"source_vocab is {source_vocab}, and a {FORMS[model_type].architecture} has one vocabulary")
    heads, ff_dim = keywords["heads"], keywords["ff_dim"]
    config = {
        "architectures": [FORMS[model_type].architecture],
        "model_type": model_type,
        "is_encoder_decoder": True,
        "vocab_size": source_vocab or vocab,
        "d_model": keywords["dim"],
        "encoder_layers": keywords["depth"],
        "decoder_layers": keywords["decoder_depth"] or keywords["depth"],
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": ff_dim,
        "decoder_ffn_dim": keywords["decoder_ff_dim"] or ff_dim,
        "max_position_embeddings": keywords["max_length"],
        "dropout": keywords["dropout"],
        "attention_dropout": keywords["attention_dropout"],
        "activation_function": {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}[keywords["activation"]],
        "scale_embedding": keywords["scaled_embedding"],
        "tie_word_embeddings": True,
    }
    if model_type == "marian":
        config |= {"decoder_vocab_size": vocab, "share_encoder_decoder_embeddings": source_vocab is None}
    return config


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


BART = ModelFamily(
    title="BART",
    model_types=tuple(FORMS),
    recipe="transformer",
    prefix="model.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    left_out={
        r"lm_head\.weight|model\.(encoder|decoder)\.embed_tokens\.weight": "a copy of the embedding",
        r"model\.(encoder|decoder)\.embed_positions\.weight": "sines and cosines, which are computed",
    },
)
"""Positions of BART and mBART begin with row 2 of their tables; norms are after branches in BART and Marian."""
