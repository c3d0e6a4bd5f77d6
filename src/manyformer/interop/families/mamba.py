"""Mamba (Gu and Dao 2023) and the recipe `mamba`."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyformer.errors import UserError
from manyformer.interop import families as rules
from manyformer.interop.families import ModelFamily, TensorRule, depthwise, each_parameter, reshaped, same
from manyformer.interop.families.decoder_parts import is_tied
from manyformer.interop.hf_folder import HFConfig
from manyformer.mixers.mamba_mixer import default_rank


def _expansion(config: HFConfig) -> int:
    expansion = config.number("expand", 2)
    if expansion != int(expansion) or expansion < 1:
        raise UserError(f"{config.file}: expand ({expansion}) must be a whole number of 1 or more")
    return int(expansion)


def _step_rank(config: HFConfig) -> int:
    if config.content.get("time_step_rank", "auto") == "auto":
        return default_rank(config.size("hidden_size"))
    return config.size("time_step_rank")


def _tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    channels = keywords["expansion"] * keywords["dim"]
    state_dim = keywords["state_dim"]
    yield same("backbone.embeddings.weight", "embed.token.weight")
    for layer in range(keywords["depth"]):
        block = f"backbone.layers.{layer}"
        branch = f"body.{layer}.mixer"
        yield same(f"{block}.norm.weight", f"{branch}.pre_norm.weight")
        mixer = f"{block}.mixer"
        inner = f"{branch}.inner"
        for part in ("in_proj", "x_proj", "out_proj"):
            yield same(f"{mixer}.{part}.weight", f"{inner}.{part}.weight")
        yield from each_parameter(f"{mixer}.dt_proj", f"{inner}.dt_proj")
        yield depthwise(f"{mixer}.conv1d.weight", f"{inner}.short_convolution.weight")
        yield same(f"{mixer}.conv1d.bias", f"{inner}.short_convolution.bias")
        yield reshaped(f"{mixer}.A_log", f"{inner}.a_log", (channels, state_dim), (channels * state_dim,))
        yield same(f"{mixer}.D", f"{inner}.skip")
    yield same("backbone.norm_f.weight", "body.norm.inner.weight")
    if not keywords["tied"]:
        yield same("lm_head.weight", "head.weight")


MAMBA = ModelFamily(
    title="Mamba",
    model_types=("mamba",),
    recipe="mamba",
    prefix="backbone.",
    config_rules=(
        rules.written(architectures=["MambaForCausalLM"], model_type="mamba"),
        rules.fixed(use_bias=False, use_conv_bias=True, hidden_act="silu"),
        rules.size("vocab_size", "vocab"),
        rules.size("hidden_size", "dim"),
        rules.size("num_hidden_layers", "depth"),
        rules.size("state_size", "state_dim", 16),
        rules.setting("expand", "expansion", _expansion),
        rules.size("conv_kernel", "conv_size", 4),
        rules.setting(
            "time_step_rank",
            "step_rank",
            _step_rank,
            lambda keywords: "auto" if keywords["step_rank"] is None else keywords["step_rank"],
        ),
        rules.number("layer_norm_epsilon", "norm_eps", 1e-5),
        rules.setting("tie_word_embeddings", "tied", is_tied),
    ),
    tensor_rules=_tensor_rules,
)

FAMILIES = (MAMBA,)
