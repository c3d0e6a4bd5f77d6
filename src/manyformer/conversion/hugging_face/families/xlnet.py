"""XLNet in one direction (Yang et al. 2019) and the recipe `transformer-xl`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    each_parameter,
    same,
)
from manyformer.conversion.hugging_face.families.bert import ACTIVATIONS
from manyformer.conversion.hugging_face.hf_folder import HFConfig


def _read_direction(config: HFConfig) -> Keywords:
    if config.content.get("attn_type", "bi") != "uni":
        raise UserError(
            f"{config.file}: attn_type is {config.content.get('attn_type', 'bi')!r:.60}, and no recipe has XLNet's "
            "attention to both sides, with which it is published; only 'uni' is a Transformer-XL"
        )
    # a part of the memory that is kept from an earlier segment: pretraining alone has it
    if config.whole_number("reuse_len", 0):
        raise UserError(
            f"{config.file}: reuse_len is {config.whole_number('reuse_len', 0)}, and no recipe has that (only 0)"
        )
    dim = config.size("d_model", 1024)
    heads = config.size("n_head", 16)
    config.require("d_head", expected=dim // heads, default=dim // heads)
    return {}


def _clamp_length(config: HFConfig) -> int | None:
    if config.content.get("clamp_len", -1) == -1:
        return None
    return config.size("clamp_len")


def _tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    dim = keywords["dim"]
    heads = keywords["heads"]
    yield same("transformer.word_embedding.weight", "embed.token.weight")
    for layer in range(keywords["depth"]):
        hf = f"transformer.layer.{layer}"
        ours = f"body.{layer}"
        attention = f"{hf}.rel_attn"
        inner = f"{ours}.attention.inner"
        yield _per_head([f"{attention}.q"], f"{inner}.q_proj.weight", dim, heads)
        yield _per_head([f"{attention}.k", f"{attention}.v"], f"{inner}.kv_proj.weight", dim, heads)
        yield _per_head([f"{attention}.r"], f"{inner}.position.r_proj.weight", dim, heads)
        yield TensorRule(
            (f"{attention}.o",),
            (f"{inner}.out_proj.weight",),
            # (d, h, e) there
            lambda x: [x[0].flatten(1)],
            lambda x: [x[0].reshape(dim, heads, -1)],
        )
        # u and v of Transformer-XL's equation of scores: biases of content and of distance
        yield same(f"{attention}.r_w_bias", f"{inner}.position.biases.u")
        yield same(f"{attention}.r_r_bias", f"{inner}.position.biases.v")
        yield from each_parameter(f"{attention}.layer_norm", f"{ours}.attention.post_norm")
        yield from each_parameter(f"{hf}.ff.layer_1", f"{ours}.ff.inner.up")
        yield from each_parameter(f"{hf}.ff.layer_2", f"{ours}.ff.inner.down")
        yield from each_parameter(f"{hf}.ff.layer_norm", f"{ours}.ff.post_norm")
    yield same("lm_loss.bias", "head.bias")


def _per_head(hf: Sequence[str], ours: str, dim: int, heads: int) -> TensorRule:
    """Projections stored as (inputs, heads, channels), of which our matrix has one after another."""

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat([part.flatten(1) for part in x], 1).T]

    def to_hf(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [part.reshape(dim, heads, -1) for part in x[0].T.chunk(len(hf), 1)]

    return TensorRule(tuple(hf), (ours,), to_ours, to_hf)


XLNET = ModelFamily(
    title="XLNet",
    model_types=("xlnet",),
    recipe="transformer-xl",
    prefix="transformer.",
    config_rules=(
        rules.demanded("an XLNet", bias_sharing="per-layer", norm_order="post", context="growing"),
        rules.demanded("an XLNet", scaled_embedding=False, head_bias=True),
        rules.implied(bias_sharing="per-layer", scaled_embedding=False, head_bias=True),
        ConfigRule(_read_direction, lambda keywords: {"attn_type": "uni"}),
        rules.required(same_length=False, bi_data=False),
        rules.fixed(tie_word_embeddings=True, architectures=["XLNetLMHeadModel"]),
        rules.written(model_type="xlnet"),
        rules.size("vocab_size", "vocab", 32000),
        rules.size("d_model", "dim", 1024),
        rules.size("n_layer", "depth", 24),
        rules.size("n_head", "heads", 16),
        rules.size("d_inner", "ff_dim", 4096),
        rules.setting("mem_len", "memory_length", lambda config: config.whole_number("mem_len", 0) or None),
        rules.setting("clamp_len", "clamp_length", _clamp_length, lambda keywords: keywords["clamp_length"] or -1),
        rules.number("dropout", "dropout", 0.1),
        rules.number("layer_norm_eps", "norm_eps", 1e-12),
        rules.choice("ff_activation", "ff_activation", "gelu", ACTIVATIONS),
    ),
    tensor_rules=_tensor_rules,
    left_out={
        r"transformer\.mask_emb": "the vector of masked tokens, which a language model in one direction does not read",
        r"transformer\.layer\.\d+\.rel_attn\.(r_s_bias|seg_embed)": "scores of pairs of texts, which the recipe does "
        "not have",
        r"lm_loss\.weight": "a copy of the embedding",
    },
)
"""XLNet with attention to the past alone is a Transformer-XL with an unscaled embedding and an output bias."""

FAMILIES = (XLNET,)
