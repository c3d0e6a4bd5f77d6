"""Qwen3-Next (Qwen 2025) and the recipe `qwen3-next`."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.families.decoder_parts import (
    expert_rules,
    frame_rules,
    gated_rules,
    layer_pattern,
    plain_rotary_base,
    size_config,
    size_keywords,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule, depthwise, grouped, same, shifted, stacked

LINEAR, FULL = "linear_attention", "full_attention"
LAYER_KINDS = {LINEAR: "L", FULL: "F"}
SIZES = {
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "delta_heads": "linear_num_value_heads",
    "delta_key_heads": "linear_num_key_heads",
    "delta_head_dim": "linear_key_head_dim",
    "delta_value_dim": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim",
    "expert_dim": "moe_intermediate_size",
    "shared_expert_dim": "shared_expert_intermediate_size",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}
"""Our keywords, and the fields with the same numbers."""
FIXED_FIELDS: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

_norm = partial(shifted, offset=1.0)


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    for name, expected in FIXED_FIELDS.items():
        config.require(name, expected=expected, default=expected)
    interval = config.size("full_attention_interval", 4)
    return {
        **size_keywords(config, tensors, norm_eps=1e-6),
        **{ours: config.size(theirs) for ours, theirs in SIZES.items()},
        "rotated_dim": _rotated_dim(config),
        "pattern": layer_pattern(config, LAYER_KINDS, default=[*[LINEAR] * (interval - 1), FULL]),
        "expert_weighting": "renormalized" if config.flag("norm_topk_prob", default=True) else "scores",
        "rope_base": plain_rotary_base(config),
    }


def _rotated_dim(config: ForeignConfig) -> int:
    """The number of channels of a head that are rotated, of which the file has the share."""
    rope = config.part("rope_parameters")
    field = rope if "partial_rotary_factor" in rope.content else config
    rotated = int(config.size("head_dim") * field.number("partial_rotary_factor", 0.25))
    if rotated < 2 or rotated % 2:
        raise UserError(f"{config.file}: partial_rotary_factor rotates {rotated} channels, which must be even")
    return rotated


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    yield from frame_rules(keywords, _norm)
    pattern = keywords["pattern"]
    for layer in range(keywords["depth"]):
        theirs, ours = f"model.layers.{layer}", f"body.{layer}"
        attention, experts = f"{ours}.attention.inner", f"{ours}.ff.inner"
        if pattern[layer % len(pattern)] == "F":
            yield from _full_attention_rules(f"{theirs}.self_attn", attention, keywords)
        else:
            yield from _delta_rules(f"{theirs}.linear_attn", attention, keywords)
        yield same(f"{theirs}.mlp.gate.weight", f"{experts}.router.proj.weight")
        yield from expert_rules(f"{theirs}.mlp.experts", f"{experts}.experts", keywords["num_experts"])
        yield from gated_rules(f"{theirs}.mlp.shared_expert", f"{experts}.shared.inner")
        yield same(f"{theirs}.mlp.shared_expert_gate.weight", f"{experts}.shared.gate.weight")


def _full_attention_rules(theirs: str, ours: str, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    width = keywords["head_dim"] or keywords["dim"] // keywords["heads"]
    rows, kv_rows = keywords["heads"] * width, (keywords["kv_heads"] or keywords["heads"]) * width
    # each head has its query and its gate side by side
    pair = {f"{ours}.q_proj.weight": [rows], f"{ours}.output_stage.gate.up.weight": [rows]}
    yield grouped(f"{theirs}.q_proj.weight", pair, keywords["heads"])
    yield stacked([f"{theirs}.{part}_proj.weight" for part in "kv"], f"{ours}.kv_proj.weight", [kv_rows] * 2)
    yield same(f"{theirs}.o_proj.weight", f"{ours}.out_proj.weight")
    for part in ("query", "key"):
        yield _norm(f"{theirs}.{part[0]}_norm.weight", f"{ours}.position.parts.0.{part}_norm.weight")


def _delta_rules(theirs: str, ours: str, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    """A key head has its query, its key, and the values and gates of its heads side by side."""
    heads, key_heads = keywords["delta_heads"], keywords["delta_key_heads"]
    keys, values = key_heads * keywords["delta_head_dim"], heads * keywords["delta_value_dim"]
    parts = {"q_proj": [keys], "kv_proj": [keys, values], "output_stage.gate.up": [values]}
    rows = {f"{ours}.{part}.weight": sizes for part, sizes in parts.items()}
    yield grouped(f"{theirs}.in_proj_qkvz.weight", rows, key_heads)
    gates = {f"{ours}.kernel.rule.gate_projection.{part}.up.weight": [heads] for part in ("strength", "decay")}
    yield grouped(f"{theirs}.in_proj_ba.weight", gates, key_heads)
    yield depthwise(f"{theirs}.conv1d.weight", f"{ours}.short_convolution.weight")
    yield same(f"{theirs}.A_log", f"{ours}.kernel.rule.decay.a_log")
    yield same(f"{theirs}.dt_bias", f"{ours}.kernel.rule.decay.dt_bias")
    # this norm alone has its gain itself
    yield same(f"{theirs}.norm.weight", f"{ours}.output_stage.norm.weight")
    yield same(f"{theirs}.out_proj.weight", f"{ours}.out_proj.weight")


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    names = {letter: kind for kind, letter in LAYER_KINDS.items()}
    pattern, heads, depth = keywords["pattern"], keywords["heads"], keywords["depth"]
    width = keywords["head_dim"] or keywords["dim"] // heads
    rotated = keywords["rotated_dim"] or max(2, width // 8 * 2)
    sizes = {**keywords, "head_dim": width, "kv_heads": keywords["kv_heads"] or heads}
    return {
        **size_config(keywords, "qwen3_next", "Qwen3NextForCausalLM"),
        **FIXED_FIELDS,
        **{theirs: sizes[ours] for ours, theirs in SIZES.items()},
        "layer_types": [names[pattern[number % len(pattern)]] for number in range(depth)],
        "norm_topk_prob": keywords["expert_weighting"] == "renormalized",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": keywords["rope_base"],
            "partial_rotary_factor": rotated / width,
        },
    }


QWEN3_NEXT = ModelFamily(
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    recipe="qwen3-next",
    prefix="model.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    left_out={r"mtp\..*": "the layer that predicts a token further ahead, which the recipe has not"},
)
"""Losses of balance are a matter of training and not taken over."""
