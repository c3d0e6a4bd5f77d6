"""The Reformer (Kitaev et al. 2020) and the recipe `reformer`."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from manyformer.errors import UserError
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import (
    WEIGHT,
    TensorRule,
    constant,
    each_parameter,
    reshaped,
    same,
    stacked,
    unused,
)

REQUIRED: Mapping[str, Any] = {
    "is_decoder": True,
    "hidden_act": "relu",
    "lsh_num_chunks_before": 1,
    "lsh_num_chunks_after": 0,
    "local_num_chunks_before": 1,
    "local_num_chunks_after": 0,
    "tie_word_embeddings": False,
}
"""The settings of a language model that the recipe cannot have otherwise."""

OUTPUT_BIAS, UNUSED_BIAS = "lm_head.decoder.bias", "lm_head.bias"
"""Before version 5 of `transformers` both are one parameter; versions up to 5.23 have the second and add no bias; from
5.24 on the first is added and the second is not used."""

LSH, LOCAL = "lsh", "local"
DEFAULT_BUCKETS = 64


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    for name, expected in REQUIRED.items():
        config.require(name, expected=expected, default=False if name == "is_decoder" else expected)
    chunk_length, head_dim = config.size("lsh_attn_chunk_length", 64), config.size("attention_head_size", 64)
    config.require("local_attn_chunk_length", expected=chunk_length, default=64)
    kinds = config.entries("attn_layers", str) or [LOCAL, LSH] * 3
    lsh_every = kinds.index(LSH) + 1 if LSH in kinds else 0
    if not lsh_every or kinds != [LOCAL if number % lsh_every else LSH for number in range(1, len(kinds) + 1)]:
        raise UserError(f"{config.file}: attn_layers must have LSH attention in every n-th layer, the others are local")
    buckets = config.content.get("num_buckets")
    factors = buckets if isinstance(buckets, list) else [buckets or DEFAULT_BUCKETS]
    if not all(type(factor) is int and 0 < factor < 1 << 16 for factor in factors):
        raise UserError(f"{config.file}: num_buckets ({buckets!r:.60}) must be a whole number or a list of them")
    return {
        "vocab": config.size("vocab_size", 320),
        "dim": config.size("hidden_size", 256),
        "depth": len(kinds),
        "heads": config.size("num_attention_heads", 12),
        "head_dim": head_dim,
        "ff_dim": config.size("feed_forward_size", 512),
        "num_buckets": int(torch.tensor(factors).prod()),
        "num_hashes": config.size("num_hashes", 1),
        "chunk_length": chunk_length,
        "lsh_every": lsh_every,
        "scale": 1.0,
        "output": "concat",
        "output_bias": OUTPUT_BIAS in tensors,
        "norm_eps": config.number("layer_norm_eps", 1e-12),
        "dropout": config.number("hidden_dropout_prob", 0.05),
        "max_length": config.size("max_position_embeddings", 4096),
        **_positions(config),
    }


def _positions(config: ForeignConfig) -> Keywords:
    if not config.flag("axial_pos_embds", default=True):
        return {"position": "learned"}
    pairs = {}
    for name, default in {"axial_pos_shape": [64, 64], "axial_pos_embds_dim": [64, 192]}.items():
        value = config.content.get(name, default)
        if not isinstance(value, list) or len(value) != 2 or not all(type(x) is int and 0 < x < 1 << 24 for x in value):
            raise UserError(f"{config.file}: {name} ({value!r:.60}) must be two whole numbers")
        pairs[name] = tuple(value)
    return {
        "position": "axial",
        "axial_rows": pairs["axial_pos_shape"][0],
        "axial_row_dim": pairs["axial_pos_embds_dim"][0],
        "max_length": pairs["axial_pos_shape"][0] * pairs["axial_pos_shape"][1],
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    embeddings = "reformer.embeddings"
    yield same(f"{embeddings}.word_embeddings.weight", "embed.token.weight")
    if keywords["position"] == "axial":
        shape, dims = _grid(keywords)
        for axis, sizes in enumerate(((shape[0], 1), (1, shape[1]))):
            theirs = f"{embeddings}.position_embeddings.weights.{axis}"
            ours = f"embed.position.axes.{axis}.weight"
            yield reshaped(theirs, ours, (*sizes, dims[axis]), (shape[axis], dims[axis]))
    else:
        yield same(f"{embeddings}.position_embeddings.embedding.weight", "embed.position.weight")
    width = keywords["heads"] * (keywords["head_dim"] or keywords["dim"] // keywords["heads"])
    for layer in range(keywords["depth"]):
        theirs, ours = f"reformer.encoder.layers.{layer}", f"body.layers.{layer}"
        attention, inner = f"{theirs}.attention", f"{ours}.attention.inner"
        yield from each_parameter(f"{attention}.layer_norm", f"{ours}.attention.pre_norm")
        is_local = (layer + 1) % keywords["lsh_every"]
        if is_local:
            yield same(f"{attention}.self_attention.query.weight", f"{inner}.q_proj.weight")
        else:
            yield constant(f"{inner}.kernel.seed", torch.tensor(layer))
            yield constant(f"{inner}.kernel.number", torch.tensor(0))
        pair = [f"{attention}.self_attention.{name}.weight" for name in ("key" if is_local else "query_key", "value")]
        yield stacked(pair, f"{inner}.kv_proj.weight", [width, width])
        yield from each_parameter(f"{attention}.output.dense", f"{inner}.out_proj", WEIGHT)
        yield from each_parameter(f"{theirs}.feed_forward.layer_norm", f"{ours}.ff.pre_norm")
        yield from each_parameter(f"{theirs}.feed_forward.dense.dense", f"{ours}.ff.inner.up")
        yield from each_parameter(f"{theirs}.feed_forward.output.dense", f"{ours}.ff.inner.down")
    yield from each_parameter("reformer.encoder.layer_norm", "body.norm.inner")
    yield same("lm_head.decoder.weight", "head.weight")
    bias_shape = (keywords["vocab"],)
    yield same(OUTPUT_BIAS, "head.bias") if keywords["output_bias"] else unused(OUTPUT_BIAS, bias_shape)
    yield unused(UNUSED_BIAS, bias_shape)


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    head_dim = keywords["head_dim"] or keywords["dim"] // keywords["heads"]
    expected = {"output": "concat", "residual_streams": "reversible", "scale": 1.0}
    for name, value in expected.items():
        if keywords[name] != value:
            raise UserError(f"{name} is {keywords[name]}, and a ReformerModelWithLMHead has {value} alone")
    if keywords["position"] == "sinusoid" or (keywords["position"] == "axial" and not keywords["axial_rows"]):
        raise UserError(
            f"position is {keywords['position']}, and a ReformerModelWithLMHead has learned positions, or axial ones "
            "with axial_rows"
        )
    lsh_every, chunk_length = keywords["lsh_every"], keywords["chunk_length"]
    config = {
        **REQUIRED,
        "architectures": ["ReformerModelWithLMHead"],
        "model_type": "reformer",
        "vocab_size": keywords["vocab"],
        "hidden_size": keywords["dim"],
        "attn_layers": [LOCAL if number % lsh_every else LSH for number in range(1, keywords["depth"] + 1)],
        "num_attention_heads": keywords["heads"],
        "attention_head_size": head_dim,
        "feed_forward_size": keywords["ff_dim"],
        "num_buckets": keywords["num_buckets"],
        "num_hashes": keywords["num_hashes"],
        "lsh_attn_chunk_length": chunk_length,
        "local_attn_chunk_length": chunk_length,
        "layer_norm_eps": keywords["norm_eps"],
        "hidden_dropout_prob": keywords["dropout"],
        "max_position_embeddings": keywords["max_length"],
        "axial_pos_embds": keywords["position"] == "axial",
    }
    if keywords["position"] == "axial":
        shape, dims = _grid(keywords)
        config |= {"axial_pos_shape": list(shape), "axial_pos_embds_dim": list(dims)}
    return config


def _grid(keywords: Mapping[str, Any]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rows and columns of axial positions, and the channels of each."""
    rows, row_dim = keywords["axial_rows"], keywords["axial_row_dim"] or keywords["dim"] // 2
    return (rows, keywords["max_length"] // rows), (row_dim, keywords["dim"] - row_dim)


REFORMER = ModelFamily(
    title="Reformer",
    model_types=("reformer",),
    recipe="reformer",
    prefix="reformer.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    left_out={re.escape(UNUSED_BIAS): f"not added to the output, whose bias is {OUTPUT_BIAS}"},
    old_names={rf"^{re.escape(UNUSED_BIAS)}$": OUTPUT_BIAS},
)
"""Equal up to a chunk of tokens: beyond, theirs counts a pair in each round and attends to other buckets of a chunk."""
