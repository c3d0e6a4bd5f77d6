"""Mixtral (Jiang et al. 2024) and the recipe `mixtral`."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyformer.interop import model_family as rules
from manyformer.interop.families.decoder_parts import (
    attention_rules,
    decoder_family,
    expert_rules,
    head_dim,
    kv_heads,
    plain_rotary,
)
from manyformer.interop.model_family import TensorRule, same

EXPERT_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


def _layer(theirs: str, ours: str, number: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    experts = f"{theirs}.block_sparse_moe"
    inner = f"{ours}.ff.inner"
    yield from attention_rules(f"{theirs}.self_attn", f"{ours}.attention.inner", keywords)
    yield same(f"{experts}.gate.weight", f"{inner}.router.proj.weight")
    yield from expert_rules(f"{experts}.experts", f"{inner}.experts", keywords["num_experts"], EXPERT_PARTS)


MIXTRAL = decoder_family(
    title="Mixtral",
    classes={"mixtral": "MixtralForCausalLM"},
    recipe="mixtral",
    norm_eps=1e-5,
    config_rules=(
        kv_heads(),
        head_dim(),
        rules.size("intermediate_size", "ff_dim"),
        rules.size("num_local_experts", "num_experts", 8),
        rules.size("num_experts_per_tok", "experts_per_token", 2),
        rules.optional_size("sliding_window", "window"),
        plain_rotary(default_base=1e6),
        rules.required(router_jitter_noise=0.0),
    ),
    layer=_layer,
)
"""Losses of balance are a matter of training and not taken over."""

FAMILIES = (MIXTRAL,)
