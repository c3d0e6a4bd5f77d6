"""XLNet in one direction (Yang et al. 2019) and the recipe `transformer-xl`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyformer.errors import UserError
from manyformer.interop.families.bert import ACTIVATION_NAMES, ACTIVATIONS
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule, each_parameter, same


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    if config.content.get("attn_type", "bi") != "uni":
        raise UserError(
            f"{config.file}: attn_type is {config.content.get('attn_type', 'bi')!r:.60}, and no recipe has XLNet's "
            "attention to both sides, with which it is published; only 'uni' is a Transformer-XL"
        )
    for name, expected in {
        "same_length": False,
        "bi_data": False,
        "tie_word_embeddings": True,
        "architectures": ["XLNetLMHeadModel"],
    }.items():
        config.require(name, expected=expected, default=expected)
    if config.whole_number("reuse_len", 0):
        raise UserError(
            f"{config.file}: reuse_len is {config.whole_number('reuse_len', 0)}, and no recipe has that (only 0)"
        )
    dim, heads = config.size("d_model", 1024), config.size("n_head", 16)
    config.require("d_head", expected=dim // heads, default=dim // heads)
    clamp = config.content.get("clamp_len", -1)
    return {
        "vocab": config.size("vocab_size", 32000),
        "dim": dim,
        "depth": config.size("n_layer", 24),
        "heads": heads,
        "ff_dim": config.size("d_inner", 4096),
        "memory_length": config.whole_number("mem_len", 0) or None,
        "clamp_length": None if clamp == -1 else config.size("clamp_len"),
        "bias_sharing": "per-layer",
        "dropout": config.number("dropout", 0.1),
        "norm_eps": config.number("layer_norm_eps", 1e-12),
        "ff_activation": ACTIVATIONS[config.choice("ff_activation", "gelu", ACTIVATIONS)],
        "scaled_embedding": False,
        "head_bias": True,
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    dim, heads = keywords["dim"], keywords["heads"]
    yield same("transformer.word_embedding.weight", "embed.token.weight")
    for layer in range(keywords["depth"]):
        theirs, ours = f"transformer.layer.{layer}", f"body.{layer}"
        attention, inner = f"{theirs}.rel_attn", f"{ours}.attention.inner"
        yield _per_head([f"{attention}.q"], f"{inner}.q_proj.weight", dim, heads)
        yield _per_head([f"{attention}.k", f"{attention}.v"], f"{inner}.kv_proj.weight", dim, heads)
        yield _per_head([f"{attention}.r"], f"{inner}.position.r_proj.weight", dim, heads)
        yield TensorRule(
            (f"{attention}.o",),
            (f"{inner}.out_proj.weight",),
            lambda x: [x[0].flatten(1)],
            lambda x: [x[0].reshape(dim, heads, -1)],
        )
        yield same(f"{attention}.r_w_bias", f"{inner}.position.biases.u")
        yield same(f"{attention}.r_r_bias", f"{inner}.position.biases.v")
        yield from each_parameter(f"{attention}.layer_norm", f"{ours}.attention.post_norm")
        yield from each_parameter(f"{theirs}.ff.layer_1", f"{ours}.ff.inner.up")
        yield from each_parameter(f"{theirs}.ff.layer_2", f"{ours}.ff.inner.down")
        yield from each_parameter(f"{theirs}.ff.layer_norm", f"{ours}.ff.post_norm")
    yield same("lm_loss.bias", "head.bias")


def _per_head(theirs: Sequence[str], ours: str, dim: int, heads: int) -> TensorRule:
    """Projections stored as (inputs, heads, channels), of which our matrix has one after another."""

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat([part.flatten(1) for part in x], 1).T]

    def to_theirs(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [part.reshape(dim, heads, -1) for part in x[0].T.chunk(len(theirs), 1)]

    return TensorRule(tuple(theirs), (ours,), to_ours, to_theirs)


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    for name, expected in {
        "bias_sharing": "per-layer",
        "norm_order": "post",
        "context": "growing",
        "scaled_embedding": False,
        "head_bias": True,
    }.items():
        if keywords[name] != expected:
            raise UserError(f"{name} is {keywords[name]}, and an XLNet has {expected} alone")
    return {
        "architectures": ["XLNetLMHeadModel"],
        "model_type": "xlnet",
        "attn_type": "uni",
        "vocab_size": keywords["vocab"],
        "d_model": keywords["dim"],
        "n_layer": keywords["depth"],
        "n_head": keywords["heads"],
        "d_inner": keywords["ff_dim"],
        "mem_len": keywords["memory_length"],
        "clamp_len": keywords["clamp_length"] or -1,
        "dropout": keywords["dropout"],
        "layer_norm_eps": keywords["norm_eps"],
        "ff_activation": ACTIVATION_NAMES[keywords["ff_activation"]],
        "tie_word_embeddings": True,
    }


XLNET = ModelFamily(
    title="XLNet",
    model_types=("xlnet",),
    recipe="transformer-xl",
    prefix="transformer.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    left_out={
        r"transformer\.mask_emb": "the vector of masked tokens, which a language model in one direction does not read",
        r"transformer\.layer\.\d+\.rel_attn\.(r_s_bias|seg_embed)": "scores of pairs of texts, which the recipe does "
        "not have",
        r"lm_loss\.weight": "a copy of the embedding",
    },
)
"""XLNet with attention to the past alone is a Transformer-XL with an unscaled embedding and an output bias."""
