"""Perceiver IO of language (Jaegle et al. 2021) and the recipe `perceiver`."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    attention_projections,
    each_module,
    each_parameter,
    same,
)
from manyformer.conversion.hugging_face.hf_folder import HFConfig

ARCHITECTURE = "PerceiverForMaskedLM"
DECODER_HEADS = 8
DECODER_HEAD_DIM = 32
"""The heads of the class's output queries and their width, which no config changes; the recipe has them everywhere."""


def _read_head(config: HFConfig) -> Keywords:
    if config.architecture != ARCHITECTURE:
        raise UserError(
            f"{config.file}: architectures is {config.architecture!r:.60}, and the recipe equals a {ARCHITECTURE} alone"
        )
    return {}


def _write_head(keywords: Mapping[str, Any]) -> Keywords:
    if keywords["head"] != "masked-lm":
        raise UserError(f"head is {keywords['head']}, and that of a {ARCHITECTURE} predicts masked tokens")
    heads = keywords["heads"]
    head_dim = keywords["head_dim"] or keywords["latent_dim"] // heads
    if (heads, head_dim) != (DECODER_HEADS, DECODER_HEAD_DIM):
        raise UserError(
            f"heads is {heads} and head_dim {head_dim}, and the output queries of a {ARCHITECTURE} have "
            f"{DECODER_HEADS} and {DECODER_HEAD_DIM}"
        )
    return {"architectures": [ARCHITECTURE]}


def _read_widths(config: HFConfig) -> Keywords:
    latent_dim = config.size("d_latents", 1280)
    config.require("v_channels", expected=latent_dim, default=None)
    return {"latent_dim": latent_dim, "ff_dim": config.size("self_attention_widening_factor", 1) * latent_dim}


def _write_widths(keywords: Mapping[str, Any]) -> Keywords:
    ff_dim = keywords["ff_dim"]
    latent_dim = keywords["latent_dim"]
    if ff_dim % latent_dim:
        raise UserError(f"ff_dim is {ff_dim}, and that of a {ARCHITECTURE} is a multiple of latent_dim")
    widening = ff_dim // latent_dim
    return {"d_latents": latent_dim, "v_channels": latent_dim, "self_attention_widening_factor": widening}


def _tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    query_rows = DECODER_HEADS * DECODER_HEAD_DIM
    encoder = "perceiver.encoder"
    ours = "body.encoder"
    # rows of keys and of values, which have other widths
    rows = [query_rows, keywords["latent_dim"]]
    yield same("perceiver.embeddings.latents", f"{ours}.latents")
    for part, name in {"embeddings": "token", "position_embeddings": "position"}.items():
        yield same(f"perceiver.input_preprocessor.{part}.weight", f"embed.{name}.weight")
    reading = f"{ours}.inner.reading"
    cross = f"{encoder}.cross_attention"
    yield from _attention_rules(cross, f"{reading}.attention.pre_norm", f"{reading}.attention.inner", rows)
    # the norm of what is read: the embedded text
    yield from each_parameter(f"{cross}.attention.self.layernorm2", f"{ours}.input_norm")
    yield from _feed_forward_rules(cross, f"{reading}.ff")
    for layer in range(keywords["depth"]):
        hf = f"{encoder}.self_attends.{layer}"
        block = f"{ours}.inner.layers.{layer}"
        yield from _attention_rules(hf, f"{block}.attention.pre_norm", f"{block}.attention.inner", rows)
        yield from _feed_forward_rules(hf, f"{block}.ff")
    decoder = "perceiver.decoder"
    writing = "body.decoder"
    rows = [query_rows, keywords["dim"]]
    cross = f"{decoder}.decoding_cross_attention"
    yield same(f"{decoder}.output_position_encodings.position_embeddings", "body.queries.weight")
    yield from _attention_rules(cross, f"{writing}.query_norm.inner", f"{writing}.attention", rows)
    # the class normalizes the latents where the queries read them, the recipe where the layers end
    yield from each_parameter(f"{cross}.attention.self.layernorm2", f"{ours}.inner.layers.norm.inner")
    yield from _feed_forward_rules(cross, f"{writing}.ff")
    yield same("embedding_decoder.bias", "head.bias")


def _attention_rules(hf: str, query_norm: str, attention: str, kv_rows: list[int]) -> Iterator[TensorRule]:
    inner = f"{hf}.attention.self"
    projections = [*(f"{inner}.{part}" for part in ("query", "key", "value")), f"{hf}.attention.output.dense"]
    yield from each_parameter(f"{inner}.layernorm1", query_norm)
    yield from attention_projections(projections, attention, kv_rows)


def _feed_forward_rules(hf: str, ours: str) -> Iterator[TensorRule]:
    names = {"layernorm": "pre_norm", "mlp.dense1": "inner.up", "mlp.dense2": "inner.down"}
    yield from each_module(hf, ours, names)


PERCEIVER = ModelFamily(
    title="Perceiver IO",
    model_types=("perceiver",),
    recipe="perceiver",
    prefix="perceiver.",
    config_rules=(
        ConfigRule(_read_head, _write_head),
        rules.written(model_type="perceiver"),
        rules.implied(heads=DECODER_HEADS, head_dim=DECODER_HEAD_DIM),
        rules.fixed(num_self_attention_heads=DECODER_HEADS, num_cross_attention_heads=DECODER_HEADS),
        rules.fixed(qk_channels=DECODER_HEADS * DECODER_HEAD_DIM, missing=None),
        rules.fixed(cross_attention_widening_factor=1, hidden_act="gelu", use_query_residual=True),
        rules.size("vocab_size", "vocab", 262),
        rules.size("d_model", "dim", 768),
        rules.size("num_self_attends_per_block", "depth", 26),
        rules.size("num_blocks", "loops", 1),
        rules.size("num_latents", "latents", 256),
        ConfigRule(_read_widths, _write_widths),
        rules.size("max_position_embeddings", "max_length", 2048),
        rules.copied("attention_probs_dropout_prob", "attention_dropout"),
    ),
    tensor_rules=_tensor_rules,
)
"""The first `max_length` outputs of their model, however long the input, are ours at the positions of the input."""

FAMILIES = (PERCEIVER,)
