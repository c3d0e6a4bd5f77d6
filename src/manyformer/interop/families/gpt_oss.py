"""gpt-oss (OpenAI 2025) and the recipe `gpt-oss`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.families.decoder_parts import (
    attention_rules,
    frame_rules,
    layer_pattern,
    rotary_config,
    rotary_keywords,
    size_config,
    size_keywords,
    yarn_keywords,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule, each_parameter, interleaved, same, transposed

LAYER_KINDS = {"sliding_attention": "W", "full_attention": "F"}
YARN_FIELDS = {"truncate": False}
FIXED_FIELDS: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    for name, expected in FIXED_FIELDS.items():
        config.require(name, expected=expected, default=expected)
    if "quantization_config" in config.content:
        raise UserError(
            f"{config.file}: quantization_config says that weights are quantized: write them as numbers first"
        )
    rotary = rotary_keywords(config, default_base=150_000.0, fixed=YARN_FIELDS)
    return {
        **size_keywords(config, tensors, norm_eps=1e-5),
        "kv_heads": config.size("num_key_value_heads", 8),
        "head_dim": config.size("head_dim", 64),
        "ff_dim": config.size("intermediate_size"),
        "num_experts": config.size("num_local_experts"),
        "experts_per_token": config.size("num_experts_per_tok", 4),
        "window": config.size("sliding_window", 128),
        "pattern": layer_pattern(config, LAYER_KINDS, default=("sliding_attention", "full_attention")),
        **yarn_keywords(config, rotary),
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    width = keywords["head_dim"] or keywords["dim"] // keywords["heads"]
    kv_rows = [width * (keywords["kv_heads"] or keywords["heads"])] * 2
    yield from frame_rules(keywords)
    for layer in range(keywords["depth"]):
        theirs, ours = f"model.layers.{layer}", f"body.{layer}"
        attention, experts = f"{ours}.attention.inner", f"{ours}.ff.inner.experts"
        yield from attention_rules(f"{theirs}.self_attn", attention, kv_rows, "all")
        yield same(f"{theirs}.self_attn.sinks", f"{attention}.kernel.sinks")
        yield from each_parameter(f"{theirs}.mlp.router", f"{ours}.ff.inner.router.proj")
        for their_end, our_end in (("", "weight"), ("_bias", "bias")):
            pair = [f"{experts}.{part}.{our_end}" for part in ("gate", "up")]
            yield interleaved(f"{theirs}.mlp.experts.gate_up_proj{their_end}", pair)
        yield transposed(f"{theirs}.mlp.experts.down_proj", f"{experts}.down.weight")
        yield same(f"{theirs}.mlp.experts.down_proj_bias", f"{experts}.down.bias")


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    names = {letter: kind for kind, letter in LAYER_KINDS.items()}
    pattern, depth = keywords["pattern"], keywords["depth"]
    yarn = {"rope_scaling": "yarn" if keywords["rope_factor"] > 1 else "none", **keywords}
    return {
        **size_config(keywords, "gpt_oss", "GptOssForCausalLM"),
        **FIXED_FIELDS,
        "num_key_value_heads": keywords["kv_heads"] or keywords["heads"],
        "head_dim": keywords["head_dim"] or keywords["dim"] // keywords["heads"],
        "intermediate_size": keywords["ff_dim"],
        "num_local_experts": keywords["num_experts"],
        "num_experts_per_tok": keywords["experts_per_token"],
        "sliding_window": keywords["window"],
        "layer_types": [names[pattern[number % len(pattern)]] for number in range(depth)],
        "rope_parameters": rotary_config(yarn, fixed=YARN_FIELDS),
    }


GPT_OSS = ModelFamily(
    title="gpt-oss",
    model_types=("gpt_oss",),
    recipe="gpt-oss",
    prefix="model.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
)
