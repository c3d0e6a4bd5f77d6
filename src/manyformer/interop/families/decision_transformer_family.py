"""The Decision Transformer (Chen et al. 2021) and the recipe `decision-transformer`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyformer.errors import UserError
from manyformer.interop import model_family as rules
from manyformer.interop.families.gpt2 import gpt2_layer_rules
from manyformer.interop.model_family import (
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    constant,
    each_parameter,
    first_row,
    same,
    scaled,
    unused,
)

POSITIONS = 1024
"""The rows of the table of positions, of which all tokens get the first."""

DEFAULT_WINDOW = 20


def _refuse_others(keywords: Mapping[str, Any]) -> Keywords:
    if keywords["body"] is not None:
        raise UserError(f"body is {keywords['body']}, and a DecisionTransformerModel has GPT-2's layers alone")
    if not keywords["returns"]:
        raise UserError("this model has no returns (returns=false), and a DecisionTransformerModel needs them")
    for name, bound in {"action_low": -1.0, "action_high": 1.0}.items():
        if any(value != bound for value in keywords[name] or ()):
            raise UserError(f"{name} is {keywords[name]}, and actions of a DecisionTransformerModel are from -1 to 1")
    return {}


def _tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
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
        yield first_row("encoder.wpe.weight", "embed.offset", POSITIONS)
    else:
        yield unused("encoder.wpe.weight", (POSITIONS, dim))
    for layer in range(keywords["depth"]):
        yield from gpt2_layer_rules(f"encoder.h.{layer}", f"body.{layer}", dim)
    yield from each_parameter("encoder.ln_f", "body.norm.inner")
    yield from each_parameter("predict_action.0", "head.project" if keywords["continuous"] else "head")
    if keywords["continuous"]:
        yield constant("head.low", -torch.ones(actions))
        yield constant("head.high", torch.ones(actions))
    yield unused("encoder.wte.weight", (1, dim))
    for name, rows in {"predict_state": observations, "predict_return": 1}.items():
        yield unused(f"{name}.weight", (rows, dim))
        yield unused(f"{name}.bias", (rows,))


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


DECISION_TRANSFORMER = ModelFamily(
    title="Decision Transformer",
    model_types=("decision_transformer",),
    recipe="decision-transformer",
    prefix="",
    config_rules=(
        ConfigRule(lambda config: {}, _refuse_others),
        rules.fixed(activation_function="relu", layer_norm_epsilon=1e-5, scale_attn_weights=True),
        rules.fixed(scale_attn_by_inverse_layer_idx=False, add_cross_attention=False, n_positions=POSITIONS),
        rules.written(architectures=["DecisionTransformerModel"], model_type="decision_transformer"),
        rules.written(vocab_size=1, attn_pdrop=0.0),
        rules.implied(offset=True),
        rules.size("state_dim", "observations", 17),
        rules.size("act_dim", "actions", 4),
        rules.flag("action_tanh", "continuous", default=True),
        rules.size("hidden_size", "dim", 128),
        rules.size("n_layer", "depth", 3),
        rules.size("n_head", "heads", 1),
        rules.setting("n_inner", "ff_dim", lambda config: config.size("n_inner", 4 * config.size("hidden_size", 128))),
        rules.number("resid_pdrop", "dropout", 0.1),
        rules.copied("embd_pdrop", "dropout"),
        rules.size("window", "window", DEFAULT_WINDOW),
        rules.size("max_ep_len", "max_episode_length", 4096),
    ),
    tensor_rules=_tensor_rules,
    left_out={
        r"encoder\.h\.\d+\.attn\.(masked_)?bias": "a causal mask, which older versions stored",
        r"predict_(state|return)\.(weight|bias)": "predictions of observations and returns, which no action needs",
        r"encoder\.wte\.weight": "an embedding of text, which is not used",
    },
)
"""Theirs adds the first row of a table of positions to all tokens, here the `offset`, and does not store the window."""

FAMILIES = (DECISION_TRANSFORMER,)
