"""Perceiver IO of language (Jaegle et al. 2021) and the recipe `perceiver`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import PARAMETERS, TensorRule, each_parameter, same, stacked

ARCHITECTURE = "PerceiverForMaskedLM"
DECODER_HEADS, DECODER_HEAD_DIM = 8, 32
"""The heads of the class's output queries and their width, which no config changes; the recipe has them everywhere."""

FIXED_FIELDS = {
    "num_self_attention_heads": DECODER_HEADS,
    "num_cross_attention_heads": DECODER_HEADS,
    "qk_channels": DECODER_HEADS * DECODER_HEAD_DIM,
    "cross_attention_widening_factor": 1,
    "hidden_act": "gelu",
    "use_query_residual": True,
}


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    if config.architecture != ARCHITECTURE:
        raise UserError(
            f"{config.file}: architectures is {config.architecture!r:.60}, and the recipe equals a {ARCHITECTURE} alone"
        )
    defaults = {**FIXED_FIELDS, "qk_channels": None}
    for name, expected in FIXED_FIELDS.items():
        config.require(name, expected=expected, default=defaults[name])
    latent_dim = config.size("d_latents", 1280)
    config.require("v_channels", expected=latent_dim, default=None)
    return {
        "vocab": config.size("vocab_size", 262),
        "dim": config.size("d_model", 768),
        "depth": config.size("num_self_attends_per_block", 26),
        "heads": DECODER_HEADS,
        "ff_dim": config.size("self_attention_widening_factor", 1) * latent_dim,
        "latents": config.size("num_latents", 256),
        "latent_dim": latent_dim,
        "head_dim": DECODER_HEAD_DIM,
        "loops": config.size("num_blocks", 1),
        "max_length": config.size("max_position_embeddings", 2048),
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    query_rows, encoder, ours = DECODER_HEADS * DECODER_HEAD_DIM, "perceiver.encoder", "body.encoder"
    rows = [query_rows, keywords["latent_dim"]]
    yield same("perceiver.embeddings.latents", f"{ours}.latents")
    for part, name in {"embeddings": "token", "position_embeddings": "position"}.items():
        yield same(f"perceiver.input_preprocessor.{part}.weight", f"embed.{name}.weight")
    reading, cross = f"{ours}.inner.reading", f"{encoder}.cross_attention"
    yield from _attention_rules(cross, f"{reading}.attention.pre_norm", f"{reading}.attention.inner", rows)
    yield from each_parameter(f"{cross}.attention.self.layernorm2", f"{ours}.input_norm")
    yield from _feed_forward_rules(cross, f"{reading}.ff")
    for layer in range(keywords["depth"]):
        foreign, block = f"{encoder}.self_attends.{layer}", f"{ours}.inner.layers.{layer}"
        yield from _attention_rules(foreign, f"{block}.attention.pre_norm", f"{block}.attention.inner", rows)
        yield from _feed_forward_rules(foreign, f"{block}.ff")
    decoder, writing = "perceiver.decoder", "body.decoder"
    rows = [query_rows, keywords["dim"]]
    cross = f"{decoder}.decoding_cross_attention"
    yield same(f"{decoder}.output_position_encodings.position_embeddings", "body.queries.weight")
    yield from _attention_rules(cross, f"{writing}.query_norm.inner", f"{writing}.attention", rows)
    # they normalize the latents where the queries read them, we where the layers end
    yield from each_parameter(f"{cross}.attention.self.layernorm2", f"{ours}.inner.layers.norm.inner")
    yield from _feed_forward_rules(cross, f"{writing}.ff")
    yield same("embedding_decoder.bias", "head.bias")


def _attention_rules(foreign: str, query_norm: str, attention: str, kv_rows: list[int]) -> Iterator[TensorRule]:
    inner = f"{foreign}.attention.self"
    yield from each_parameter(f"{inner}.layernorm1", query_norm)
    yield from each_parameter(f"{inner}.query", f"{attention}.q_proj")
    for kind in PARAMETERS:
        yield stacked([f"{inner}.{part}.{kind}" for part in ("key", "value")], f"{attention}.kv_proj.{kind}", kv_rows)
    yield from each_parameter(f"{foreign}.attention.output.dense", f"{attention}.out_proj")


def _feed_forward_rules(foreign: str, ours: str) -> Iterator[TensorRule]:
    yield from each_parameter(f"{foreign}.layernorm", f"{ours}.pre_norm")
    yield from each_parameter(f"{foreign}.mlp.dense1", f"{ours}.inner.up")
    yield from each_parameter(f"{foreign}.mlp.dense2", f"{ours}.inner.down")


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    if keywords["head"] != "masked-lm":
        raise UserError(f"head is {keywords['head']}, and that of a {ARCHITECTURE} predicts masked tokens")
    heads, latent_dim = keywords["heads"], keywords["latent_dim"]
    head_dim = keywords["head_dim"] or latent_dim // heads
    if (heads, head_dim) != (DECODER_HEADS, DECODER_HEAD_DIM):
        raise UserError(
            f"heads is {heads} and head_dim {head_dim}, and the output queries of a {ARCHITECTURE} have "
            f"{DECODER_HEADS} and {DECODER_HEAD_DIM}"
        )
    if keywords["ff_dim"] % latent_dim:
        raise UserError(f"ff_dim is {keywords['ff_dim']}, and that of a {ARCHITECTURE} is a multiple of latent_dim")
    return {
        **FIXED_FIELDS,
        "architectures": [ARCHITECTURE],
        "model_type": "perceiver",
        "vocab_size": keywords["vocab"],
        "d_model": keywords["dim"],
        "num_self_attends_per_block": keywords["depth"],
        "num_blocks": keywords["loops"],
        "self_attention_widening_factor": keywords["ff_dim"] // latent_dim,
        "num_latents": keywords["latents"],
        "d_latents": latent_dim,
        "v_channels": latent_dim,
        "max_position_embeddings": keywords["max_length"],
        "attention_probs_dropout_prob": keywords["attention_dropout"],
    }


PERCEIVER = ModelFamily(
    title="Perceiver IO",
    model_types=("perceiver",),
    recipe="perceiver",
    prefix="perceiver.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
)
"""The first `max_length` outputs of their model, however long the input, are ours at the positions of the input."""
