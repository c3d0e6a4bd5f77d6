"""The Decision Transformer (Chen et al. 2021) and the recipe `decision-transformer`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyformer.errors import UserError
from manyformer.interop.families.gpt2 import gpt2_layer_rules
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.model_family import Keywords, ModelFamily
from manyformer.interop.tensor_rules import TensorRule, constant, each_parameter, first_row, same, scaled, unused

REQUIRED: Mapping[str, Any] = {
    "activation_function": "relu",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "n_positions": 1024,
}
"""The settings that the recipe cannot have otherwise; of the table of positions, all tokens get the first row."""

DEFAULT_WINDOW = 20


def _read_keywords(config: ForeignConfig, tensors: Collection[str]) -> Keywords:
    for name, expected in REQUIRED.items():
        config.require(name, expected=expected, default=expected)
    dim = config.size("hidden_size", 128)
    return {
        "observations": config.size("state_dim", 17),
        "actions": config.size("act_dim", 4),
        "continuous": config.flag("action_tanh", default=True),
        "dim": dim,
        "depth": config.size("n_layer", 3),
        "heads": config.size("n_head", 1),
        "ff_dim": config.size("n_inner", 4 * dim),
        "dropout": config.number("resid_pdrop", 0.1),
        "window": config.size("window", DEFAULT_WINDOW),
        "max_episode_length": config.size("max_ep_len", 4096),
        "offset": True,
    }


def _rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    dim, observations, actions = (keywords[name] for name in ("dim", "observations", "actions"))
    mean = torch.tensor(keywords["observation_mean"] or [0.0] * observations)
    std = torch.tensor(keywords["observation_std"] or [1.0] * observations)
    yield same("embed_timestep.weight", "embed.timestep.weight")
    yield scaled("embed_return.weight", "embed.embed_return.weight", keywords["return_scale"])
    yield same("embed_return.bias", "embed.embed_return.bias")
    yield _standardized("embed_state", "embed.embed_observation", mean, std)
    yield constant("embed.mean", mean)
    yield constant("embed.std", std)
    yield from each_parameter("embed_action", "embed.embed_action")
    yield from each_parameter("embed_ln", "embed.norm")
    if keywords["offset"]:
        yield first_row("encoder.wpe.weight", "embed.offset", REQUIRED["n_positions"])
    else:
        yield unused("encoder.wpe.weight", (REQUIRED["n_positions"], dim))
    for layer in range(keywords["depth"]):
        yield from gpt2_layer_rules(f"encoder.h.{layer}", f"body.{layer}", dim)
    yield from each_parameter("encoder.ln_f", "body.norm.inner")
    yield from each_parameter("predict_action.0", "head.project" if keywords["continuous"] else "head")
    if keywords["continuous"]:
        yield constant("head.low", -torch.ones(actions))
        yield constant("head.high", torch.ones(actions))
    yield unused("encoder.wte.weight", (1, dim))
    for name, size in {"predict_state": observations, "predict_return": 1}.items():
        yield unused(f"{name}.weight", (size, dim))
        yield unused(f"{name}.bias", (size,))


def _standardized(theirs: str, ours: str, mean: Tensor, std: Tensor) -> TensorRule:
    """Our layer reads observations less their mean, divided by their deviation, and theirs as they are."""

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        weight, bias = x
        return [weight * std, bias + weight @ mean]

    def to_theirs(x: Sequence[Tensor]) -> Sequence[Tensor]:
        weight, bias = x
        folded = weight / std.to(weight.device)
        return [folded, bias - folded @ mean.to(weight.device)]

    names = [[f"{name}.{kind}" for kind in ("weight", "bias")] for name in (theirs, ours)]
    return TensorRule(tuple(names[0]), tuple(names[1]), to_ours, to_theirs)


def _write_config(keywords: Mapping[str, Any]) -> Keywords:
    if keywords["body"] is not None:
        raise UserError(f"body is {keywords['body']}, and a DecisionTransformerModel has GPT-2's layers alone")
    if not keywords["returns"]:
        raise UserError("this model has no returns (returns=false), and a DecisionTransformerModel needs them")
    for name, bound in {"action_low": -1.0, "action_high": 1.0}.items():
        if any(value != bound for value in keywords[name] or ()):
            raise UserError(f"{name} is {keywords[name]}, and actions of a DecisionTransformerModel are from -1 to 1")
    return {
        **REQUIRED,
        "architectures": ["DecisionTransformerModel"],
        "model_type": "decision_transformer",
        "vocab_size": 1,
        "state_dim": keywords["observations"],
        "act_dim": keywords["actions"],
        "action_tanh": keywords["continuous"],
        "hidden_size": keywords["dim"],
        "n_layer": keywords["depth"],
        "n_head": keywords["heads"],
        "n_inner": keywords["ff_dim"],
        "max_ep_len": keywords["max_episode_length"],
        "window": keywords["window"],
        "resid_pdrop": keywords["dropout"],
        "embd_pdrop": keywords["dropout"],
        "attn_pdrop": 0.0,
    }


DECISION_TRANSFORMER = ModelFamily(
    title="Decision Transformer",
    model_types=("decision_transformer",),
    recipe="decision-transformer",
    prefix="",
    read_keywords=_read_keywords,
    rules=_rules,
    write_config=_write_config,
    left_out={
        r"encoder\.h\.\d+\.attn\.(masked_)?bias": "a causal mask, which older versions stored",
        r"predict_(state|return)\.(weight|bias)": "predictions of observations and returns, which no action needs",
        r"encoder\.wte\.weight": "an embedding of text, which is not used",
    },
)
"""Theirs adds the first row of a table of positions to all tokens, here the `offset`, and does not store the window."""
