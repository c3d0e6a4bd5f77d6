"""gpt-oss (OpenAI 2025) and the recipe `gpt-oss`."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop import model_family as rules
from manyformer.interop.families.decoder_parts import (
    attention_rules,
    decoder_family,
    head_dim,
    kv_heads,
    layer_pattern,
    yarn_rotary,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import (
    ConfigRule,
    Keywords,
    TensorRule,
    each_parameter,
    interleaved,
    same,
    transposed,
)

LAYER_KINDS = {"sliding_attention": "W", "full_attention": "F"}


def _read_no_quantization(config: ForeignConfig) -> Keywords:
    if "quantization_config" in config.content:
        raise UserError(
            f"{config.file}: quantization_config says that weights are quantized: write them as numbers first"
        )
    return {}


def _layer(theirs: str, ours: str, number: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    attention = f"{ours}.attention.inner"
    experts = f"{ours}.ff.inner.experts"
    yield from attention_rules(f"{theirs}.self_attn", attention, keywords, biases="all")
    yield same(f"{theirs}.self_attn.sinks", f"{attention}.kernel.sinks")
    yield from each_parameter(f"{theirs}.mlp.router", f"{ours}.ff.inner.router.proj")
    for their_end, our_end in (("", "weight"), ("_bias", "bias")):
        pair = [f"{experts}.{part}.{our_end}" for part in ("gate", "up")]
        yield interleaved(f"{theirs}.mlp.experts.gate_up_proj{their_end}", pair)
    yield transposed(f"{theirs}.mlp.experts.down_proj", f"{experts}.down.weight")
    yield same(f"{theirs}.mlp.experts.down_proj_bias", f"{experts}.down.bias")


GPT_OSS = decoder_family(
    title="gpt-oss",
    classes={"gpt_oss": "GptOssForCausalLM"},
    recipe="gpt-oss",
    norm_eps=1e-5,
    config_rules=(
        rules.fixed(attention_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0),
        ConfigRule(_read_no_quantization, lambda keywords: {}),
        kv_heads(default=8),
        head_dim(lambda config: config.size("head_dim", 64)),
        rules.size("intermediate_size", "ff_dim"),
        rules.size("num_local_experts", "num_experts"),
        rules.size("num_experts_per_tok", "experts_per_token", 4),
        rules.size("sliding_window", "window", 128),
        layer_pattern(LAYER_KINDS, lambda config: tuple(LAYER_KINDS)),
        yarn_rotary({"truncate": False}, default_base=150_000.0),
    ),
    layer=_layer,
)

FAMILIES = (GPT_OSS,)
