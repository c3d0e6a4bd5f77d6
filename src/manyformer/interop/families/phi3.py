"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024) and the recipe `llama`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.families.decoder_parts import frame_rules, rotary_keywords, size_config, size_keywords
from manyformer.interop.families.llama import PLAIN
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule, divided, same
from manyformer.recipes.llama import read_divisors

LONGROPE_TYPES = ("longrope", "su", "yarn")
"""What files call LongRoPE: older ones have other names."""

ALLOWED = {"window", "rotated_dim"}
"""The keywords of the recipe that a Phi-3 has besides those of Llama."""


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    config.require("hidden_act", expected="silu", default="silu")
    sizes = size_keywords(config, tensors, norm_eps=1e-5)
    width = sizes["dim"] // sizes["heads"]
    return {
        **sizes,
        "kv_heads": config.size("num_key_value_heads", sizes["heads"]),
        "ff_dim": config.size("intermediate_size"),
        "window": config.optional_size("sliding_window"),
        **_rotary_keywords(config, width),
    }


def _rotary_keywords(config: ForeignConfig, width: int) -> Keywords:
    rope = config.part("rope_parameters" if "rope_parameters" in config.content else "rope_scaling")
    share = rope if "partial_rotary_factor" in rope.content else config
    rotated = int(width * share.number("partial_rotary_factor", 1.0))
    keywords: Keywords = {"rotated_dim": None if rotated == width else rotated}
    kind = rope.content.get("rope_type", rope.content.get("type", "default"))
    if kind not in LONGROPE_TYPES:
        return keywords | rotary_keywords(config)
    rope.require("attention_factor", expected=None, default=None)
    length = rope if "original_max_position_embeddings" in rope.content else config
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


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    width = keywords["head_dim"] or keywords["dim"] // keywords["heads"]
    rows = [width * keywords["heads"], 2 * width * (keywords["kv_heads"] or keywords["heads"])]
    yield from frame_rules(keywords)
    for layer in range(keywords["depth"]):
        foreign, attention, ff = f"model.layers.{layer}", f"body.{layer}.attention.inner", f"body.{layer}.ff.inner"
        projections = _weights(attention, ("q_proj", "kv_proj"))
        yield divided(f"{foreign}.self_attn.qkv_proj.weight", projections, rows)
        yield same(f"{foreign}.self_attn.o_proj.weight", f"{attention}.out_proj.weight")
        yield divided(f"{foreign}.mlp.gate_up_proj.weight", _weights(ff, ("gate", "up")), [keywords["ff_dim"]] * 2)
        yield same(f"{foreign}.mlp.down_proj.weight", f"{ff}.down.weight")


def _weights(module: str, parts: Sequence[str]) -> list[str]:
    return [f"{module}.{part}.weight" for part in parts]


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    for name, default in PLAIN.items():
        if keywords[name] != default and name not in ALLOWED:
            raise UserError(f"{name} is {keywords[name]}, which a Phi3ForCausalLM does not have")
    width = keywords["dim"] // keywords["heads"]
    if keywords["head_dim"] not in (None, width) or keywords["ff_activation"] != "silu":
        raise UserError("a Phi3ForCausalLM has heads of dim / heads channels, and silu")
    share = (keywords["rotated_dim"] or width) / width
    rope: Keywords = {"rope_type": "default", "rope_theta": keywords["rope_base"], "partial_rotary_factor": share}
    longest: Keywords = {}
    if keywords["rope_scaling"] not in ("none", "longrope"):
        raise UserError(f"rope_scaling is {keywords['rope_scaling']}, and a Phi3ForCausalLM has longrope alone")
    if keywords["rope_scaling"] == "longrope":
        divisors, original = read_divisors(keywords["rope_divisors"]), keywords["original_length"]
        longest = {"max_position_embeddings": round(original * keywords["rope_factor"])}
        longest["original_max_position_embeddings"] = original
        rope |= {
            "rope_type": "longrope",
            "short_factor": list(divisors["original"]),
            "long_factor": list(divisors["extended"]),
            "factor": keywords["rope_factor"],
            "original_max_position_embeddings": original,
        }
    return {
        **size_config(keywords, "phi3", "Phi3ForCausalLM"),
        **longest,
        "num_key_value_heads": keywords["kv_heads"] or keywords["heads"],
        "intermediate_size": keywords["ff_dim"],
        "sliding_window": keywords["window"],
        "rope_parameters": rope,
    }


PHI3 = ModelFamily(
    title="Phi-3",
    model_types=("phi3",),
    recipe="llama",
    prefix="model.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
)
"""Theirs takes the divisors by the length of each call; an import has those for texts of up to `original_length`."""
