"""DiffLlama, the Differential Transformer (Ye et al. 2024) of `transformers`, and the recipe `diff-transformer`."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyformer.interop import model_family as rules
from manyformer.interop.families.decoder_parts import (
    attention_rules,
    decoder_family,
    gated_rules,
    head_dim,
    kv_heads,
    plain_rotary,
)
from manyformer.interop.model_family import TensorRule, same

VECTORS = {"lambda_q1": "query_1", "lambda_k1": "key_1", "lambda_q2": "query_2", "lambda_k2": "key_2"}


def _layer(theirs: str, ours: str, number: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    attention = f"{ours}.attention.inner"
    yield from attention_rules(f"{theirs}.self_attn", attention, keywords)
    for part, our_part in VECTORS.items():
        yield same(f"{theirs}.self_attn.{part}", f"{attention}.kernel.{our_part}")
    yield from gated_rules(f"{theirs}.mlp", f"{ours}.ff.inner")


DIFFLLAMA = decoder_family(
    title="DiffLlama",
    classes={"diffllama": "DiffLlamaForCausalLM"},
    recipe="diff-transformer",
    norm_eps=1e-5,
    config_rules=(
        kv_heads(),
        head_dim(),
        rules.size("intermediate_size", "ff_dim"),
        plain_rotary(),
        rules.required(attention_bias=False),
    ),
    layer=_layer,
)

FAMILIES = (DIFFLLAMA,)
