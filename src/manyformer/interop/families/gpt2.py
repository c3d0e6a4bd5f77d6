"""GPT-2 (Radford et al. 2019) and the recipe `transformer-lm`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import PARAMETERS, TensorRule, divided, each_parameter, same, transposed

ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
"""From the names of activations to the approximation of GELU that they are."""


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    for name, expected in {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }.items():
        config.require(name, expected=expected, default=expected)
    dim = config.size("n_embd", 768)
    return {
        "vocab": config.size("vocab_size", 50257),
        "dim": dim,
        "depth": config.size("n_layer", 12),
        "heads": config.size("n_head", 12),
        "ff_dim": config.size("n_inner", 4 * dim),
        "max_length": config.size("n_positions", 1024),
        "dropout": config.number("resid_pdrop", 0.1),
        "gelu_approximate": ACTIVATIONS[config.choice("activation_function", "gelu_new", ACTIVATIONS)],
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    dim = keywords["dim"]
    yield same("transformer.wte.weight", "embed.token.weight")
    yield same("transformer.wpe.weight", "embed.position.weight")
    for layer in range(keywords["depth"]):
        yield from gpt2_layer_rules(f"transformer.h.{layer}", f"body.{layer}", dim)
    yield from each_parameter("transformer.ln_f", "body.norm.inner")


def gpt2_layer_rules(theirs: str, ours: str, dim: int) -> Iterator[TensorRule]:
    """The tensors of one layer."""
    attention, ff = f"{ours}.attention", f"{ours}.ff"
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


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    expected: Keywords = {"norm_order": "pre", "residual_streams": "plain", "kernel": "softmax", "sinks": None}
    expected |= {"kv_heads": None, "loops": 1}
    for name, value in expected.items():
        if keywords[name] != value:
            raise UserError(f"{name} is {keywords[name]}, and a GPT-2 has {value} alone")
    dropout = keywords["dropout"]
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": keywords["vocab"],
        "n_embd": keywords["dim"],
        "n_layer": keywords["depth"],
        "n_head": keywords["heads"],
        "n_inner": keywords["ff_dim"],
        "n_positions": keywords["max_length"],
        "activation_function": "gelu_new" if keywords["gelu_approximate"] == "tanh" else "gelu",
        "layer_norm_epsilon": keywords["norm_eps"],
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": keywords["attention_dropout"],
        "tie_word_embeddings": True,
    }


GPT2 = ModelFamily(
    title="GPT-2",
    model_types=("gpt2",),
    recipe="transformer-lm",
    prefix="transformer.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    left_out={
        r"transformer\.h\.\d+\.attn\.(masked_)?bias": "a causal mask, which older versions stored",
        r"lm_head\.weight": "a copy of the embedding",
    },
)
"""GPT-2's weights are stored as (inputs, outputs), and queries, keys and values in one matrix."""
