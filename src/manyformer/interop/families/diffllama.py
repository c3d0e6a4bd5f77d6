"""DiffLlama, the Differential Transformer (Ye et al. 2024) of `transformers`, and the recipe `diff-transformer`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.interop.families.decoder_parts import (
    attention_rules,
    frame_rules,
    gated_rules,
    plain_rotary_base,
    size_config,
    size_keywords,
)
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule, same

VECTORS = {"lambda_q1": "query_1", "lambda_k1": "key_1", "lambda_q2": "query_2", "lambda_k2": "key_2"}


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    config.require("hidden_act", expected="silu", default="silu")
    config.require("attention_bias", expected=False, default=False)
    return {
        **size_keywords(config, tensors, norm_eps=1e-5),
        "kv_heads": config.size("num_key_value_heads", config.size("num_attention_heads")),
        "head_dim": config.optional_size("head_dim"),
        "ff_dim": config.size("intermediate_size"),
        "rope_base": plain_rotary_base(config),
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    width = keywords["head_dim"] or keywords["dim"] // keywords["heads"]
    kv_rows = [width * (keywords["kv_heads"] or keywords["heads"])] * 2
    yield from frame_rules(keywords)
    for layer in range(keywords["depth"]):
        theirs, ours = f"model.layers.{layer}", f"body.{layer}"
        yield from attention_rules(f"{theirs}.self_attn", f"{ours}.attention.inner", kv_rows, "none")
        for part, our_part in VECTORS.items():
            yield same(f"{theirs}.self_attn.{part}", f"{ours}.attention.inner.kernel.{our_part}")
        yield from gated_rules(f"{theirs}.mlp", f"{ours}.ff.inner")


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    return {
        **size_config(keywords, "diffllama", "DiffLlamaForCausalLM"),
        "num_key_value_heads": keywords["kv_heads"] or keywords["heads"],
        "head_dim": keywords["head_dim"] or keywords["dim"] // keywords["heads"],
        "intermediate_size": keywords["ff_dim"],
        "rope_parameters": {"rope_type": "default", "rope_theta": keywords["rope_base"]},
    }


DIFFLLAMA = ModelFamily(
    title="DiffLlama",
    model_types=("diffllama",),
    recipe="diff-transformer",
    prefix="model.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
)
