"""GPT-2 (Radford et al. 2019) and the recipe `transformer-lm`."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyformer.interop import model_family as rules
from manyformer.interop.model_family import (
    PARAMETERS,
    ModelFamily,
    TensorRule,
    divided,
    each_parameter,
    same,
    transposed,
)

ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
"""From the names of activations to the approximation of GELU that they are."""


def _tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    dim = keywords["dim"]
    yield same("transformer.wte.weight", "embed.token.weight")
    yield same("transformer.wpe.weight", "embed.position.weight")
    for layer in range(keywords["depth"]):
        yield from gpt2_layer_rules(f"transformer.h.{layer}", f"body.{layer}", dim)
    yield from each_parameter("transformer.ln_f", "body.norm.inner")


def gpt2_layer_rules(theirs: str, ours: str, dim: int) -> Iterator[TensorRule]:
    """The tensors of one layer."""
    attention = f"{ours}.attention"
    ff = f"{ours}.ff"
    for kind in PARAMETERS:
        parts = [f"{attention}.inner.{part}.{kind}" for part in ("q_proj", "kv_proj")]
        yield divided(f"{theirs}.attn.c_attn.{kind}", parts, [dim, 2 * dim], is_transposed=kind == "weight")
    for their_part, our_part in (
        ("attn.c_proj", f"{attention}.inner.out_proj"),
        ("mlp.c_fc", f"{ff}.inner.up"),
        ("mlp.c_proj", f"{ff}.inner.down"),
    ):
        yield transposed(f"{theirs}.{their_part}.weight", f"{our_part}.weight")
        yield same(f"{theirs}.{their_part}.bias", f"{our_part}.bias")
    yield from each_parameter(f"{theirs}.ln_1", f"{attention}.pre_norm")
    yield from each_parameter(f"{theirs}.ln_2", f"{ff}.pre_norm")


GPT2 = ModelFamily(
    title="GPT-2",
    model_types=("gpt2",),
    recipe="transformer-lm",
    prefix="transformer.",
    config_rules=(
        rules.demanded("a GPT-2", norm_order="pre", residual_streams="plain", kernel="softmax", sinks=None),
        rules.demanded("a GPT-2", kv_heads=None, loops=1),
        rules.written(architectures=["GPT2LMHeadModel"], model_type="gpt2"),
        rules.required(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
        rules.fixed(tie_word_embeddings=True),
        rules.size("vocab_size", "vocab", 50257),
        rules.size("n_embd", "dim", 768),
        rules.size("n_layer", "depth", 12),
        rules.size("n_head", "heads", 12),
        rules.setting("n_inner", "ff_dim", lambda config: config.size("n_inner", 4 * config.size("n_embd", 768))),
        rules.size("n_positions", "max_length", 1024),
        rules.choice("activation_function", "gelu_approximate", "gelu_new", ACTIVATIONS),
        rules.number("layer_norm_epsilon", "norm_eps", 1e-5),
        rules.number("resid_pdrop", "dropout", 0.1),
        rules.copied("embd_pdrop", "dropout"),
        rules.copied("attn_pdrop", "attention_dropout"),
    ),
    tensor_rules=_tensor_rules,
    left_out={
        r"transformer\.h\.\d+\.attn\.(masked_)?bias": "a causal mask, which older versions stored",
        r"lm_head\.weight": "a copy of the embedding",
    },
)
"""GPT-2's weights are stored as (inputs, outputs), and queries, keys and values in one matrix."""

FAMILIES = (GPT2,)
