"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024) and the recipe `llama`."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop import model_family as rules
from manyformer.interop.families.decoder_parts import decoder_family, kv_heads, read_rotary
from manyformer.interop.families.llama import refuse_others
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import ConfigRule, Keywords, TensorRule, divided, same
from manyformer.recipes.llama import read_divisors

LONGROPE_TYPES = ("longrope", "su", "yarn")
"""What files call LongRoPE: older ones have other names."""


def _refuse_others(keywords: Mapping[str, Any]) -> Keywords:
    refuse_others(keywords, ("window", "rotated_dim"), "a Phi3ForCausalLM")
    width = keywords["dim"] // keywords["heads"]
    if keywords["head_dim"] not in (None, width) or keywords["ff_activation"] != "silu":
        raise UserError("a Phi3ForCausalLM has heads of dim / heads channels, and silu")
    if keywords["rope_scaling"] not in ("none", "longrope"):
        raise UserError(f"rope_scaling is {keywords['rope_scaling']}, and a Phi3ForCausalLM has longrope alone")
    return {}


def _read_rotary(config: ForeignConfig) -> Keywords:
    width = config.size("hidden_size") // config.size("num_attention_heads")
    rope = config.part("rope_parameters" if "rope_parameters" in config.content else "rope_scaling")
    if "partial_rotary_factor" in rope.content:
        share = rope
    else:
        share = config
    rotated = int(width * share.number("partial_rotary_factor", 1.0))
    keywords: Keywords = {"rotated_dim": None if rotated == width else rotated}
    kind = rope.content.get("rope_type", rope.content.get("type", "default"))
    if kind not in LONGROPE_TYPES:
        return keywords | read_rotary(config)
    rope.require("attention_factor", expected=None, default=None)
    if "original_max_position_embeddings" in rope.content:
        length = rope
    else:
        length = config
    original = length.size("original_max_position_embeddings", 4096)
    factor = rope.number("factor", config.size("max_position_embeddings", 4096) / original)
    base = rope if "rope_theta" in rope.content else config
    divisors = [_numbers(rope, name, rotated // 2) for name in ("short_factor", "long_factor")]
    return keywords | {
        "rope_scaling": "longrope",
        "rope_base": base.number("rope_theta", 10_000.0),
        "rope_factor": max(1.0, factor),
        "original_length": original,
        "rope_divisors": "/".join(divisors),
    }


def _numbers(rope: ForeignConfig, name: str, count: int) -> str:
    """A list of `count` numbers above 0 as a text with commas."""
    values = rope.content.get(name)
    numbers: list[Any] = values if isinstance(values, list) else []
    if len(numbers) != count or not all(type(number) in (int, float) and 0 < number < 1e30 for number in numbers):
        raise UserError(f"{rope.file}: {name} ({values!r:.60}) must be a list of {count} numbers above 0")
    return ",".join(map(repr, numbers))


def _write_rotary(keywords: Mapping[str, Any]) -> Keywords:
    width = keywords["dim"] // keywords["heads"]
    share = (keywords["rotated_dim"] or width) / width
    rope: Keywords = {"rope_type": "default", "rope_theta": keywords["rope_base"], "partial_rotary_factor": share}
    if keywords["rope_scaling"] == "none":
        return {"rope_parameters": rope}
    divisors = read_divisors(keywords["rope_divisors"])
    original = keywords["original_length"]
    rope |= {
        "rope_type": "longrope",
        "short_factor": list(divisors["original"]),
        "long_factor": list(divisors["extended"]),
        "factor": keywords["rope_factor"],
        "original_max_position_embeddings": original,
    }
    return {
        "rope_parameters": rope,
        "max_position_embeddings": round(original * keywords["rope_factor"]),
        "original_max_position_embeddings": original,
    }


def _layer(theirs: str, ours: str, number: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    attention = f"{ours}.attention.inner"
    ff = f"{ours}.ff.inner"
    width = keywords["dim"] // keywords["heads"]
    rows = [width * keywords["heads"], 2 * width * (keywords["kv_heads"] or keywords["heads"])]
    projections = [f"{attention}.{part}.weight" for part in ("q_proj", "kv_proj")]
    yield divided(f"{theirs}.self_attn.qkv_proj.weight", projections, rows)
    yield same(f"{theirs}.self_attn.o_proj.weight", f"{attention}.out_proj.weight")
    inputs = [f"{ff}.{part}.weight" for part in ("gate", "up")]
    yield divided(f"{theirs}.mlp.gate_up_proj.weight", inputs, [keywords["ff_dim"]] * 2)
    yield same(f"{theirs}.mlp.down_proj.weight", f"{ff}.down.weight")


PHI3 = decoder_family(
    title="Phi-3",
    classes={"phi3": "Phi3ForCausalLM"},
    recipe="llama",
    norm_eps=1e-5,
    config_rules=(
        ConfigRule(lambda config: {}, _refuse_others),
        kv_heads(),
        rules.size("intermediate_size", "ff_dim"),
        rules.optional_size("sliding_window", "window"),
        ConfigRule(_read_rotary, _write_rotary),
    ),
    layer=_layer,
)
"""Theirs takes the divisors by the length of each call; an import has those for texts of up to `original_length`."""

FAMILIES = (PHI3,)
