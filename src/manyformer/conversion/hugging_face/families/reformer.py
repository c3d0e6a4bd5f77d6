"""The Reformer (Kitaev et al. 2020) and the recipe `reformer`."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    WEIGHT,
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    constant,
    each_parameter,
    reshaped,
    same,
    stacked,
    unused,
)
from manyformer.conversion.hugging_face.hf_folder import HFConfig

OUTPUT_BIAS = "lm_head.decoder.bias"
UNUSED_BIAS = "lm_head.bias"
"""Before version 5 of `transformers` both are one parameter; versions up to 5.23 have the second and add no bias; from
5.24 on the first is added and the second is not used."""

LSH = "lsh"
LOCAL = "local"
DEFAULT_BUCKETS = 64


def _read_chunks(config: HFConfig) -> Keywords:
    chunk_length = config.size("lsh_attn_chunk_length", 64)
    # the recipe has one length for both kinds of layers
    config.require("local_attn_chunk_length", expected=chunk_length, default=64)
    return {"chunk_length": chunk_length}


def _write_chunks(keywords: Mapping[str, Any]) -> Keywords:
    return dict.fromkeys(("lsh_attn_chunk_length", "local_attn_chunk_length"), keywords["chunk_length"])


def _read_layers(config: HFConfig) -> Keywords:
    kinds = config.entries("attn_layers", str) or [LOCAL, LSH] * 3
    lsh_every = kinds.index(LSH) + 1 if LSH in kinds else 0
    if not lsh_every or kinds != [LOCAL if number % lsh_every else LSH for number in range(1, len(kinds) + 1)]:
        raise UserError(f"{config.file}: attn_layers must have LSH attention in every n-th layer, the others are local")
    return {"depth": len(kinds), "lsh_every": lsh_every}


def _write_layers(keywords: Mapping[str, Any]) -> Keywords:
    numbers = range(1, keywords["depth"] + 1)
    return {"attn_layers": [LOCAL if number % keywords["lsh_every"] else LSH for number in numbers]}


def _num_buckets(config: HFConfig) -> int:
    """The number of buckets, which may be the product of several."""
    buckets = config.content.get("num_buckets")
    if isinstance(buckets, list):
        factors = buckets
    else:
        factors = [buckets or DEFAULT_BUCKETS]
    if not all(type(factor) is int and 0 < factor < 1 << 16 for factor in factors):
        raise UserError(f"{config.file}: num_buckets ({buckets!r:.60}) must be a whole number or a list of them")
    return int(torch.tensor(factors).prod())


def _read_positions(config: HFConfig) -> Keywords:
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


def _write_positions(keywords: Mapping[str, Any]) -> Keywords:
    position = keywords["position"]
    if position == "sinusoid" or (position == "axial" and not keywords["axial_rows"]):
        raise UserError(
            f"position is {position}, and a ReformerModelWithLMHead has learned positions, or axial ones with "
            "axial_rows"
        )
    fields: Keywords = {"axial_pos_embds": position == "axial"}
    if position == "axial":
        shape, dims = _grid(keywords)
        fields |= {"axial_pos_shape": list(shape), "axial_pos_embds_dim": list(dims)}
    return fields


def _grid(keywords: Mapping[str, Any]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rows and columns of axial positions, and the channels of each."""
    rows = keywords["axial_rows"]
    row_dim = keywords["axial_row_dim"] or keywords["dim"] // 2
    return (rows, keywords["max_length"] // rows), (row_dim, keywords["dim"] - row_dim)


def _head_width(keywords: Mapping[str, Any]) -> int:
    return int(keywords["head_dim"] or keywords["dim"] // keywords["heads"])


def _tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    embeddings = "reformer.embeddings"
    yield same(f"{embeddings}.word_embeddings.weight", "embed.token.weight")
    if keywords["position"] == "axial":
        shape, dims = _grid(keywords)
        # (rows, 1, d) and (1, columns, d), so that the class can add them by broadcasting
        for axis, sizes in enumerate(((shape[0], 1), (1, shape[1]))):
            hf = f"{embeddings}.position_embeddings.weights.{axis}"
            ours = f"embed.position.axes.{axis}.weight"
            yield reshaped(hf, ours, (*sizes, dims[axis]), (shape[axis], dims[axis]))
    else:
        yield same(f"{embeddings}.position_embeddings.embedding.weight", "embed.position.weight")
    width = keywords["heads"] * _head_width(keywords)
    for layer in range(keywords["depth"]):
        hf = f"reformer.encoder.layers.{layer}"
        ours = f"body.layers.{layer}"
        attention = f"{hf}.attention"
        inner = f"{ours}.attention.inner"
        yield from each_parameter(f"{attention}.layer_norm", f"{ours}.attention.pre_norm")
        is_local = (layer + 1) % keywords["lsh_every"]
        if is_local:
            yield same(f"{attention}.self_attention.query.weight", f"{inner}.q_proj.weight")
        else:
            # seed and number of the draw of hash rotations, which the class draws anew in each call
            yield constant(f"{inner}.kernel.seed", torch.tensor(layer))
            yield constant(f"{inner}.kernel.number", torch.tensor(0))
        pair = [f"{attention}.self_attention.{name}.weight" for name in ("key" if is_local else "query_key", "value")]
        yield stacked(pair, f"{inner}.kv_proj.weight", [width, width])
        yield from each_parameter(f"{attention}.output.dense", f"{inner}.out_proj", WEIGHT)
        yield from each_parameter(f"{hf}.feed_forward.layer_norm", f"{ours}.ff.pre_norm")
        yield from each_parameter(f"{hf}.feed_forward.dense.dense", f"{ours}.ff.inner.up")
        yield from each_parameter(f"{hf}.feed_forward.output.dense", f"{ours}.ff.inner.down")
    yield from each_parameter("reformer.encoder.layer_norm", "body.norm.inner")
    yield same("lm_head.decoder.weight", "head.weight")
    bias_shape = (keywords["vocab"],)
    yield same(OUTPUT_BIAS, "head.bias") if keywords["output_bias"] else unused(OUTPUT_BIAS, bias_shape)
    yield unused(UNUSED_BIAS, bias_shape)


REFORMER = ModelFamily(
    title="Reformer",
    model_types=("reformer",),
    recipe="reformer",
    prefix="reformer.",
    config_rules=(
        rules.demanded("a ReformerModelWithLMHead", output="concat", residual_streams="reversible", scale=1.0),
        rules.implied(output="concat", scale=1.0),
        rules.written(architectures=["ReformerModelWithLMHead"], model_type="reformer"),
        rules.fixed(is_decoder=True, missing=False),
        rules.fixed(hidden_act="relu", tie_word_embeddings=False),
        rules.fixed(lsh_num_chunks_before=1, lsh_num_chunks_after=0),
        rules.fixed(local_num_chunks_before=1, local_num_chunks_after=0),
        rules.size("vocab_size", "vocab", 320),
        rules.size("hidden_size", "dim", 256),
        ConfigRule(_read_layers, _write_layers),
        rules.size("num_attention_heads", "heads", 12),
        rules.setting(
            "attention_head_size", "head_dim", lambda config: config.size("attention_head_size", 64), _head_width
        ),
        rules.size("feed_forward_size", "ff_dim", 512),
        rules.setting("num_buckets", "num_buckets", _num_buckets),
        rules.size("num_hashes", "num_hashes", 1),
        ConfigRule(_read_chunks, _write_chunks),
        rules.number("layer_norm_eps", "norm_eps", 1e-12),
        rules.number("hidden_dropout_prob", "dropout", 0.05),
        rules.size("max_position_embeddings", "max_length", 4096),
        ConfigRule(_read_positions, _write_positions),
        ConfigRule(lambda config: {"output_bias": OUTPUT_BIAS in config.tensors}, lambda keywords: {}),
    ),
    tensor_rules=_tensor_rules,
    left_out={re.escape(UNUSED_BIAS): f"not added to the output, whose bias is {OUTPUT_BIAS}"},
    old_names={rf"^{re.escape(UNUSED_BIAS)}$": OUTPUT_BIAS},
)
"""Equal up to a chunk of tokens: beyond, the class counts a pair in each round, and sees other buckets of a chunk."""

FAMILIES = (REFORMER,)
