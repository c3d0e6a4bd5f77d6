"""Decoders with recurrent layers, each with the recipe of its name: Qwen3-Next (2025) and Mamba (Gu and Dao 2023)."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    depthwise,
    each_parameter,
    grouped,
    reshaped,
    same,
    shifted,
    stacked,
)
from manyformer.conversion.hugging_face.families.decoder_parts import (
    decoder_family,
    expert_rules,
    gated_rules,
    head_dim,
    head_width,
    is_tied,
    kv_heads,
    layer_pattern,
    plain_rotary_base,
)
from manyformer.conversion.hugging_face.hf_folder import HFConfig
from manyformer.nn.recurrent.mamba_mixer import default_rank

LINEAR_LAYER = "linear_attention"
FULL_LAYER = "full_attention"

_qwen3_next_norm = partial(shifted, offset=1.0)


def _usual_layers(config: HFConfig) -> list[str]:
    """The kinds of layers of one period, where the config does not list them."""
    return [*[LINEAR_LAYER] * (config.size("full_attention_interval", 4) - 1), FULL_LAYER]


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


def _qwen3_next_layer(hf: str, ours: str, layer: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
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
        yield _qwen3_next_norm(f"{hf}.{part[0]}_norm.weight", f"{ours}.position.parts.0.{part}_norm.weight")


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
        layer_pattern({LINEAR_LAYER: "L", FULL_LAYER: "F"}, _usual_layers),
        rules.either("norm_topk_prob", "expert_weighting", "renormalized", "scores"),
        ConfigRule(_read_rotary, _write_rotary),
    ),
    layer=_qwen3_next_layer,
    norm=_qwen3_next_norm,
    left_out={r"mtp\..*": "the layer that predicts a token further ahead, which the recipe has not"},
)
"""Losses of balance are a matter of training and not taken over."""


def _expansion(config: HFConfig) -> int:
    expansion = config.number("expand", 2)
    if expansion != int(expansion) or expansion < 1:
        raise UserError(f"{config.file}: expand ({expansion}) must be a whole number of 1 or more")
    return int(expansion)


def _step_rank(config: HFConfig) -> int:
    if config.content.get("time_step_rank", "auto") == "auto":
        return default_rank(config.size("hidden_size"))
    return config.size("time_step_rank")


def _mamba_tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    channels = keywords["expansion"] * keywords["dim"]
    state_dim = keywords["state_dim"]
    yield same("backbone.embeddings.weight", "embed.token.weight")
    for layer in range(keywords["depth"]):
        block = f"backbone.layers.{layer}"
        branch = f"body.{layer}.mixer"
        yield same(f"{block}.norm.weight", f"{branch}.pre_norm.weight")
        mixer = f"{block}.mixer"
        inner = f"{branch}.inner"
        for part in ("in_proj", "x_proj", "out_proj"):
            yield same(f"{mixer}.{part}.weight", f"{inner}.{part}.weight")
        yield from each_parameter(f"{mixer}.dt_proj", f"{inner}.dt_proj")
        yield depthwise(f"{mixer}.conv1d.weight", f"{inner}.short_convolution.weight")
        yield same(f"{mixer}.conv1d.bias", f"{inner}.short_convolution.bias")
        # a vector here, which weight decay leaves alone
        yield reshaped(f"{mixer}.A_log", f"{inner}.a_log", (channels, state_dim), (channels * state_dim,))
        yield same(f"{mixer}.D", f"{inner}.skip")
    yield same("backbone.norm_f.weight", "body.norm.inner.weight")
    if not keywords["tied"]:
        yield same("lm_head.weight", "head.weight")


MAMBA = ModelFamily(
    title="Mamba",
    model_types=("mamba",),
    recipe="mamba",
    prefix="backbone.",
    config_rules=(
        rules.written(architectures=["MambaForCausalLM"], model_type="mamba"),
        rules.fixed(use_bias=False, use_conv_bias=True, hidden_act="silu"),
        rules.size("vocab_size", "vocab"),
        rules.size("hidden_size", "dim"),
        rules.size("num_hidden_layers", "depth"),
        rules.size("state_size", "state_dim", 16),
        rules.setting("expand", "expansion", _expansion),
        rules.size("conv_kernel", "conv_size", 4),
        rules.setting(
            "time_step_rank",
            "step_rank",
            _step_rank,
            lambda keywords: "auto" if keywords["step_rank"] is None else keywords["step_rank"],
        ),
        rules.number("layer_norm_epsilon", "norm_eps", 1e-5),
        rules.setting("tie_word_embeddings", "tied", is_tied),
        rules.demanded("a MambaForCausalLM", negative_eigenvalues=False),
    ),
    tensor_rules=_mamba_tensor_rules,
)

FAMILIES = (QWEN3_NEXT, MAMBA)
