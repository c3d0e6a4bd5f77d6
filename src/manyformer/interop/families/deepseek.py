"""DeepSeek-V3 (2024) and the recipe `deepseek`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

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
from manyformer.interop.tensor_rules import TensorRule, same

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
YARN_FIELDS = {"mscale": 1.0, "mscale_all_dim": 1.0}
"""How the temperature of YaRN acts on all channels in released models."""


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    heads = config.size("num_attention_heads")
    config.require("hidden_act", expected="silu", default="silu")
    config.require("attention_bias", expected=False, default=False)
    config.require("num_key_value_heads", expected=heads, default=heads)
    rotary = rotary_keywords(config, fixed=YARN_FIELDS)
    return {
        **size_keywords(config, tensors, norm_eps=1e-6),
        **{ours: config.size(theirs) for ours, theirs in SIZES.items()},
        "query_latent_dim": config.optional_size("q_lora_rank"),
        "dense_layers": config.whole_number("first_k_dense_replace", 3),
        "expert_scale": config.number("routed_scaling_factor", 2.5),
        "expert_weighting": "renormalized" if config.flag("norm_topk_prob", default=True) else "scores",
        "rope_pairs": "interleaved" if config.flag("rope_interleave", default=True) else "halves",
        **yarn_keywords(config, rotary),
    }


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
        if layer < keywords["dense_layers"]:
            yield from gated_rules(f"{theirs}.mlp", f"{ours}.ff.inner")
            continue
        router = f"{ours}.ff.inner.router"
        yield same(f"{theirs}.mlp.gate.weight", f"{router}.proj.weight")
        yield same(f"{theirs}.mlp.gate.e_score_correction_bias", f"{router}.selection_bias.bias")
        yield from expert_rules(f"{theirs}.mlp.experts", f"{ours}.ff.inner.experts", keywords["num_experts"])
        yield from gated_rules(f"{theirs}.mlp.shared_experts", f"{ours}.ff.inner.shared")


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    yarn = {"rope_scaling": "yarn" if keywords["rope_factor"] > 1 else "none", **keywords}
    return {
        **size_config(keywords, "deepseek_v3", "DeepseekV3ForCausalLM"),
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
    model_types=("deepseek_v3",),
    recipe="deepseek",
    prefix="model.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    left_out={r"model\.layers\.61\..*": "the layer that predicts a token further ahead, which the recipe has not"},
)
