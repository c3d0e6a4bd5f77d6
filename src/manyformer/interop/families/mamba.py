"""Mamba (Gu and Dao 2023) and the recipe `mamba`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop.families.decoder_parts import is_tied
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule, each_parameter, reshaped, same
from manyformer.mixers.mamba_mixer import default_rank


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    for name, expected in (("use_bias", False), ("use_conv_bias", True), ("hidden_act", "silu")):
        config.require(name, expected=expected, default=expected)
    dim, is_automatic = config.size("hidden_size"), config.content.get("time_step_rank", "auto") == "auto"
    expansion = config.number("expand", 2)
    if expansion != int(expansion) or expansion < 1:
        raise UserError(f"{config.file}: expand ({expansion}) must be a whole number of 1 or more")
    return {
        "vocab": config.size("vocab_size"),
        "dim": dim,
        "depth": config.size("num_hidden_layers"),
        "state_dim": config.size("state_size", 16),
        "expansion": int(expansion),
        "conv_size": config.size("conv_kernel", 4),
        "step_rank": default_rank(dim) if is_automatic else config.size("time_step_rank"),
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "tied": is_tied(config, tensors),
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    channels, state_dim = keywords["expansion"] * keywords["dim"], keywords["state_dim"]
    yield same("backbone.embeddings.weight", "embed.token.weight")
    for layer in range(keywords["depth"]):
        block, branch = f"backbone.layers.{layer}", f"body.{layer}.mixer"
        yield same(f"{block}.norm.weight", f"{branch}.pre_norm.weight")
        mixer, inner = f"{block}.mixer", f"{branch}.inner"
        for part in ("in_proj", "x_proj", "out_proj"):
            yield same(f"{mixer}.{part}.weight", f"{inner}.{part}.weight")
        yield from each_parameter(f"{mixer}.dt_proj", f"{inner}.dt_proj")
        yield _convolution(f"{mixer}.conv1d.weight", f"{inner}.short_convolution.weight")
        yield same(f"{mixer}.conv1d.bias", f"{inner}.short_convolution.bias")
        yield reshaped(f"{mixer}.A_log", f"{inner}.a_log", (channels, state_dim), (channels * state_dim,))
        yield same(f"{mixer}.D", f"{inner}.skip")
    yield same("backbone.norm_f.weight", "body.norm.inner.weight")
    if not keywords["tied"]:
        yield same("lm_head.weight", "head.weight")


def _convolution(foreign: str, own: str) -> TensorRule:
    """The taps of a depthwise convolution, stored as (channels, 1, taps); ours are (taps, channels)."""
    return TensorRule((foreign,), (own,), lambda x: [x[0][:, 0].mT], lambda x: [x[0].mT[:, None]])


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    rank = keywords["step_rank"]
    return {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "vocab_size": keywords["vocab"],
        "hidden_size": keywords["dim"],
        "num_hidden_layers": keywords["depth"],
        "state_size": keywords["state_dim"],
        "expand": keywords["expansion"],
        "conv_kernel": keywords["conv_size"],
        "time_step_rank": "auto" if rank is None else rank,
        "layer_norm_epsilon": keywords["norm_eps"],
        "tie_word_embeddings": keywords["tied"],
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
    }


MAMBA = ModelFamily(
    title="Mamba",
    model_types=("mamba",),
    recipe="mamba",
    prefix="backbone.",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
)
