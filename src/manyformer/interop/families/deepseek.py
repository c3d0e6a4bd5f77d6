"""DeepSeek-V3 (2024), DeepSeek-V3.2 (2025) and the recipe `deepseek`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.families.decoder_parts import (
    expert_rules,
    frame_rules,
    gated_rules,
    rotary_config,
    rotary_keywords,
    size_config,
    size_keywords,
    yarn_keywords,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule, each_parameter, same

SIZES = {
    "head_dim": "qk_nope_head_dim",
    "rotary_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "latent_dim": "kv_lora_rank",
    "ff_dim": "intermediate_size",
    "expert_dim": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "shared_experts": "n_shared_experts",
    "expert_groups": "n_group",
    "groups_per_token": "topk_group",
}
"""Our keywords, and the fields with the same numbers."""
INDEXER_SIZES = {"indexed_tokens": "index_topk", "indexer_heads": "index_n_heads", "indexer_dim": "index_head_dim"}
"""The same of the indexer of V3.2."""
INDEXER_PARTS = {"wq_b": "q_proj", "wk": "k_proj", "weights_proj": "weight_proj"}
SPARSE_TYPE = "deepseek_v32"
YARN_FIELDS = {"mscale": 1.0, "mscale_all_dim": 1.0}
"""How the temperature of YaRN acts on all channels in released models."""


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    heads = config.size("num_attention_heads")
    config.require("hidden_act", expected="silu", default="silu")
    config.require("attention_bias", expected=False, default=False)
    config.require("num_key_value_heads", expected=heads, default=heads)
    rotary = rotary_keywords(config, fixed=YARN_FIELDS)
    indexer: Keywords = {}
    dense_layers = config.whole_number("first_k_dense_replace", 3)
    if config.content["model_type"] == SPARSE_TYPE:
        indexer = {ours: config.size(name) for ours, name in INDEXER_SIZES.items()}
        dense_layers = _dense_layers(config, dense_layers)
    return {
        **indexer,
        **size_keywords(config, tensors, norm_eps=1e-6),
        **{ours: config.size(theirs) for ours, theirs in SIZES.items()},
        "query_latent_dim": config.optional_size("q_lora_rank"),
        "dense_layers": dense_layers,
        "expert_scale": config.number("routed_scaling_factor", 2.5),
        "expert_weighting": "renormalized" if config.flag("norm_topk_prob", default=True) else "scores",
        "rope_pairs": "interleaved" if config.flag("rope_interleave", default=True) else "halves",
        **yarn_keywords(config, rotary),
    }


def _dense_layers(config: ForeignConfig, default: int) -> int:
    """The number of first layers without experts. Raises UserError where layers with experts precede others."""
    kinds = config.entries("mlp_layer_types", str)
    if kinds is None:
        return default
    depth = config.size("num_hidden_layers")
    count = kinds.count("dense")
    if kinds != ["dense"] * count + ["sparse"] * (depth - count):
        raise UserError(f"{config.file}: mlp_layer_types must name dense and then sparse layers, {depth} of them")
    return count


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    query_parts = {"q_proj": "q_proj"}
    if keywords["query_latent_dim"] is not None:
        query_parts = {"q_a_proj": "q_down_proj", "q_a_layernorm": "q_norm", "q_b_proj": "q_proj"}
    parts = query_parts | {
        "kv_a_proj_with_mqa": "kv_down_proj",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "kv_proj",
        "o_proj": "out_proj",
    }
    yield from frame_rules(keywords)
    for layer in range(keywords["depth"]):
        theirs, ours = f"model.layers.{layer}", f"body.{layer}"
        for part, our_part in parts.items():
            yield same(f"{theirs}.self_attn.{part}.weight", f"{ours}.attention.inner.{our_part}.weight")
        if keywords["indexed_tokens"] is not None:
            indexer = (f"{theirs}.self_attn.indexer", f"{ours}.attention.inner.indexer")
            for part, our_part in INDEXER_PARTS.items():
                yield same(f"{indexer[0]}.{part}.weight", f"{indexer[1]}.{our_part}.weight")
            yield from each_parameter(f"{indexer[0]}.k_norm", f"{indexer[1]}.k_norm")
        if layer < keywords["dense_layers"]:
            yield from gated_rules(f"{theirs}.mlp", f"{ours}.ff.inner")
            continue
        router = f"{ours}.ff.inner.router"
        yield same(f"{theirs}.mlp.gate.weight", f"{router}.proj.weight")
        yield same(f"{theirs}.mlp.gate.e_score_correction_bias", f"{router}.selection_bias.bias")
        yield from expert_rules(f"{theirs}.mlp.experts", f"{ours}.ff.inner.experts", keywords["num_experts"])
        yield from gated_rules(f"{theirs}.mlp.shared_experts", f"{ours}.ff.inner.shared")


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    is_sparse = keywords["indexed_tokens"] is not None
    model_type, architecture = (
        (SPARSE_TYPE, "DeepseekV32ForCausalLM") if is_sparse else ("deepseek_v3", "DeepseekV3ForCausalLM")
    )
    indexer = {name: keywords[ours] for ours, name in INDEXER_SIZES.items()} if is_sparse else {}
    if is_sparse and keywords["rope_pairs"] != "interleaved":
        raise UserError(f"rope_pairs is {keywords['rope_pairs']}, and a DeepseekV32ForCausalLM has interleaved ones")
    yarn = {"rope_scaling": "yarn" if keywords["rope_factor"] > 1 else "none", **keywords}
    return {
        **size_config(keywords, model_type, architecture),
        **indexer,
        **{theirs: keywords[ours] for ours, theirs in SIZES.items()},
        "num_key_value_heads": keywords["heads"],
        "q_lora_rank": keywords["query_latent_dim"],
        "first_k_dense_replace": keywords["dense_layers"],
        "routed_scaling_factor": keywords["expert_scale"],
        "norm_topk_prob": keywords["expert_weighting"] == "renormalized",
        "rope_interleave": keywords["rope_pairs"] == "interleaved",
        "rope_parameters": rotary_config(yarn, fixed=YARN_FIELDS),
        "num_nextn_predict_layers": 0,
    }


DEEPSEEK = ModelFamily(
    title="DeepSeek-V3",
    model_types=("deepseek_v3", SPARSE_TYPE),
    recipe="deepseek",
    prefix="model.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    left_out={r"model\.layers\.61\..*": "the layer that predicts a token further ahead, which the recipe has not"},
)
