"""Qwen3-Next (Qwen 2025) and the recipe `qwen3-next`."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from manyformer.errors import UserError
from manyformer.interop import families as rules
from manyformer.interop.families import ConfigRule, Keywords, TensorRule, depthwise, grouped, same, shifted, stacked
from manyformer.interop.families.decoder_parts import (
    decoder_family,
    expert_rules,
    gated_rules,
    head_dim,
    head_width,
    kv_heads,
    layer_pattern,
    plain_rotary_base,
)
from manyformer.interop.hf_folder import HFConfig

LINEAR = "linear_attention"
FULL = "full_attention"

_norm = partial(shifted, offset=1.0)


def _usual_layers(config: HFConfig) -> list[str]:
    """The kinds of layers of one period, where the config does not list them."""
    return [*[LINEAR] * (config.size("full_attention_interval", 4) - 1), FULL]


def _read_rotary(config: HFConfig) -> Keywords:
    return {"rotated_dim": _rotated_dim(config), "rope_base": plain_rotary_base(config)}


def _write_rotary(keywords: Mapping[str, Any]) -> Keywords:
    width = head_width(keywords)
    rotated = keywords["rotated_dim"] or max(2, width // 8 * 2)
    rope = {"rope_type": "default", "rope_theta": keywords["rope_base"], "partial_rotary_factor": rotated / width}
    return {"rope_parameters": rope}


def _rotated_dim(config: HFConfig) -> int:
    """The number of channels of a head that are rotated, of which the file has the share."""
    rope = config.part("rope_parameters")
    if "partial_rotary_factor" in rope.content:
        field = rope
    else:
        field = config
    rotated = int(config.size("head_dim") * field.number("partial_rotary_factor", 0.25))
    if rotated < 2 or rotated % 2:
        raise UserError(f"{config.file}: partial_rotary_factor rotates {rotated} channels, which must be even")
    return rotated


def _layer(hf: str, ours: str, layer: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    attention = f"{ours}.attention.inner"
    experts = f"{ours}.ff.inner"
    pattern = keywords["pattern"]
    if pattern[layer % len(pattern)] == "F":
        yield from _full_attention_rules(f"{hf}.self_attn", attention, keywords)
    else:
        yield from _delta_rules(f"{hf}.linear_attn", attention, keywords)
    yield same(f"{hf}.mlp.gate.weight", f"{experts}.router.proj.weight")
    yield from expert_rules(f"{hf}.mlp.experts", f"{experts}.experts", keywords["num_experts"])
    yield from gated_rules(f"{hf}.mlp.shared_expert", f"{experts}.shared.inner")
    yield same(f"{hf}.mlp.shared_expert_gate.weight", f"{experts}.shared.gate.weight")


def _full_attention_rules(hf: str, ours: str, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    width = head_width(keywords)
    rows = keywords["heads"] * width
    kv_rows = (keywords["kv_heads"] or keywords["heads"]) * width
    # each head has its query and its gate side by side
    pair = {f"{ours}.q_proj.weight": [rows], f"{ours}.output_stage.gate.up.weight": [rows]}
    yield grouped(f"{hf}.q_proj.weight", pair, keywords["heads"])
    yield stacked([f"{hf}.{part}_proj.weight" for part in "kv"], f"{ours}.kv_proj.weight", [kv_rows] * 2)
    yield same(f"{hf}.o_proj.weight", f"{ours}.out_proj.weight")
    for part in ("query", "key"):
        yield _norm(f"{hf}.{part[0]}_norm.weight", f"{ours}.position.parts.0.{part}_norm.weight")


def _delta_rules(hf: str, ours: str, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    """A key head has its query, its key, and the values and gates of its heads side by side."""
    heads = keywords["delta_heads"]
    key_heads = keywords["delta_key_heads"]
    keys = key_heads * keywords["delta_head_dim"]
    values = heads * keywords["delta_value_dim"]
    parts = {"q_proj": [keys], "kv_proj": [keys, values], "output_stage.gate.up": [values]}
    rows = {f"{ours}.{part}.weight": sizes for part, sizes in parts.items()}
    yield grouped(f"{hf}.in_proj_qkvz.weight", rows, key_heads)
    gates = {f"{ours}.kernel.rule.gate_projection.{part}.up.weight": [heads] for part in ("strength", "decay")}
    yield grouped(f"{hf}.in_proj_ba.weight", gates, key_heads)
    yield depthwise(f"{hf}.conv1d.weight", f"{ours}.short_convolution.weight")
    yield same(f"{hf}.A_log", f"{ours}.kernel.rule.decay.a_log")
    yield same(f"{hf}.dt_bias", f"{ours}.kernel.rule.decay.dt_bias")
    # this norm alone has its gain itself
    yield same(f"{hf}.norm.weight", f"{ours}.output_stage.norm.weight")
    yield same(f"{hf}.out_proj.weight", f"{ours}.out_proj.weight")


QWEN3_NEXT = decoder_family(
    title="Qwen3-Next",
    classes={"qwen3_next": "Qwen3NextForCausalLM"},
    recipe="qwen3-next",
    norm_eps=1e-6,
    config_rules=(
        rules.fixed(attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[]),
        kv_heads(default=None),
        head_dim(lambda config: config.size("head_dim")),
        rules.size("linear_num_value_heads", "delta_heads"),
        rules.size("linear_num_key_heads", "delta_key_heads"),
        rules.size("linear_key_head_dim", "delta_head_dim"),
        rules.size("linear_value_head_dim", "delta_value_dim"),
        rules.size("linear_conv_kernel_dim", "conv_size"),
        rules.size("moe_intermediate_size", "expert_dim"),
        rules.size("shared_expert_intermediate_size", "shared_expert_dim"),
        rules.size("num_experts", "num_experts"),
        rules.size("num_experts_per_tok", "experts_per_token"),
        layer_pattern({LINEAR: "L", FULL: "F"}, _usual_layers),
        rules.either("norm_topk_prob", "expert_weighting", "renormalized", "scores"),
        ConfigRule(_read_rotary, _write_rotary),
    ),
    layer=_layer,
    norm=_norm,
    left_out={r"mtp\..*": "the layer that predicts a token further ahead, which the recipe has not"},
)
"""Losses of balance are a matter of training and not taken over."""

FAMILIES = (QWEN3_NEXT,)
