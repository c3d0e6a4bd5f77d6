"""Mixtral (Jiang et al. 2024) and the recipe `mixtral`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.interop.families.decoder_parts import (
    attention_rules,
    expert_rules,
    frame_rules,
    plain_rotary_base,
    size_config,
    size_keywords,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule, same

EXPERT_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    config.require("hidden_act", expected="silu", default="silu")
    config.require("router_jitter_noise", expected=0.0, default=0.0)
    return {
        **size_keywords(config, tensors, norm_eps=1e-5),
        "kv_heads": config.size("num_key_value_heads", config.size("num_attention_heads")),
        "head_dim": config.optional_size("head_dim"),
        "ff_dim": config.size("intermediate_size"),
        "num_experts": config.size("num_local_experts", 8),
        "experts_per_token": config.size("num_experts_per_tok", 2),
        "window": config.optional_size("sliding_window"),
        "rope_base": plain_rotary_base(config, default_base=1e6),
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    width = keywords["head_dim"] or keywords["dim"] // keywords["heads"]
    kv_rows = [width * (keywords["kv_heads"] or keywords["heads"])] * 2
    yield from frame_rules(keywords)
    for layer in range(keywords["depth"]):
        theirs, ours = f"model.layers.{layer}", f"body.{layer}"
        yield from attention_rules(f"{theirs}.self_attn", f"{ours}.attention.inner", kv_rows, "none")
        yield same(f"{theirs}.block_sparse_moe.gate.weight", f"{ours}.ff.inner.router.proj.weight")
        experts = (f"{theirs}.block_sparse_moe.experts", f"{ours}.ff.inner.experts")
        yield from expert_rules(*experts, keywords["num_experts"], EXPERT_PARTS)


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    return {
        **size_config(keywords, "mixtral", "MixtralForCausalLM"),
        "num_key_value_heads": keywords["kv_heads"] or keywords["heads"],
        "head_dim": keywords["head_dim"] or keywords["dim"] // keywords["heads"],
        "intermediate_size": keywords["ff_dim"],
        "num_local_experts": keywords["num_experts"],
        "num_experts_per_tok": keywords["experts_per_token"],
        "sliding_window": keywords["window"],
        "rope_parameters": {"rope_type": "default", "rope_theta": keywords["rope_base"]},
    }


MIXTRAL = ModelFamily(
    title="Mixtral",
    model_types=("mixtral",),
    recipe="mixtral",
    prefix="model.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
)
"""Losses of balance are a matter of training and not taken over."""
