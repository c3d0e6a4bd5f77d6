"""GPT-2 (Radford et al. 2019) with the recipe `transformer-lm`, and the Decision Transformer, whose layers are GPT-2's.

The Decision Transformer (Chen et al. 2021) has the recipe `decision-transformer`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import (
    PARAMETERS,
    ConfigRule,
    Keywords,
    ModelFamily,
    TensorRule,
    constant,
    divided,
    each_parameter,
    first_row,
    same,
    scaled,
    transposed,
    unused,
)

GPT2_ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
"""From the names of activations to the approximation of GELU that they are."""


def _gpt2_tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    dim = keywords["dim"]
    yield same("transformer.wte.weight", "embed.token.weight")
    yield same("transformer.wpe.weight", "embed.position.weight")
    for layer in range(keywords["depth"]):
        yield from gpt2_layer_rules(f"transformer.h.{layer}", f"body.{layer}", dim)
    yield from each_parameter("transformer.ln_f", "body.norm.inner")


def gpt2_layer_rules(hf: str, ours: str, dim: int) -> Iterator[TensorRule]:
    """The tensors of one layer."""
    attention = f"{ours}.attention"
    ff = f"{ours}.ff"
    for kind in PARAMETERS:
        parts = [f"{attention}.inner.{part}.{kind}" for part in ("q_proj", "kv_proj")]
        # one matrix of queries, keys and values there; here queries, and keys with values
        yield divided(f"{hf}.attn.c_attn.{kind}", parts, [dim, 2 * dim], is_transposed=kind == "weight")
    for hf_part, our_part in (
        ("attn.c_proj", f"{attention}.inner.out_proj"),
        ("mlp.c_fc", f"{ff}.inner.up"),
        ("mlp.c_proj", f"{ff}.inner.down"),
    ):
        yield transposed(f"{hf}.{hf_part}.weight", f"{our_part}.weight")
        yield same(f"{hf}.{hf_part}.bias", f"{our_part}.bias")
    yield from each_parameter(f"{hf}.ln_1", f"{attention}.pre_norm")
    yield from each_parameter(f"{hf}.ln_2", f"{ff}.pre_norm")


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
        rules.choice("activation_function", "gelu_approximate", "gelu_new", GPT2_ACTIVATIONS),
        rules.number("layer_norm_epsilon", "norm_eps", 1e-5),
        rules.number("resid_pdrop", "dropout", 0.1),
        rules.copied("embd_pdrop", "dropout"),
        rules.copied("attn_pdrop", "attention_dropout"),
    ),
    tensor_rules=_gpt2_tensor_rules,
    left_out={
        r"transformer\.h\.\d+\.attn\.(masked_)?bias": "a causal mask, which older versions stored",
        r"lm_head\.weight": "a copy of the embedding",
    },
)
"""GPT-2's weights are stored as (inputs, outputs), and queries, keys and values in one matrix."""


DECISION_POSITIONS = 1024
"""The rows of the table of positions, of which all tokens get the first."""

DECISION_WINDOW = 20


def _refuse_unless_decision(keywords: Mapping[str, Any]) -> Keywords:
    if keywords["body"] is not None:
        raise UserError(f"body is {keywords['body']}, and a DecisionTransformerModel has GPT-2's layers alone")
    if not keywords["returns"]:
        raise UserError("this model has no returns (returns=false), and a DecisionTransformerModel needs them")
    for name, bound in {"action_low": -1.0, "action_high": 1.0}.items():
        if any(value != bound for value in keywords[name] or ()):
            raise UserError(f"{name} is {keywords[name]}, and actions of a DecisionTransformerModel are from -1 to 1")
    return {}


def _decision_tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    dim, observations, actions = (keywords[name] for name in ("dim", "observations", "actions"))
    mean = torch.tensor(keywords["observation_mean"] or [0.0] * observations)
    std = torch.tensor(keywords["observation_std"] or [1.0] * observations)
    yield same("embed_timestep.weight", "embed.timestep.weight")
    # the recipe divides returns before it embeds them
    yield scaled("embed_return.weight", "embed.embed_return.weight", keywords["return_scale"])
    yield same("embed_return.bias", "embed.embed_return.bias")
    yield _standardized("embed_state", "embed.embed_observation", mean, std)
    yield constant("embed.mean", mean)
    yield constant("embed.std", std)
    yield from each_parameter("embed_action", "embed.embed_action")
    yield from each_parameter("embed_ln", "embed.norm")
    if keywords["offset"]:
        yield first_row("encoder.wpe.weight", "embed.offset", DECISION_POSITIONS)
    else:
        # zeros in every row: no offset
        yield unused("encoder.wpe.weight", (DECISION_POSITIONS, dim))
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


def _standardized(hf: str, ours: str, mean: Tensor, std: Tensor) -> TensorRule:
    """Our layer reads observations less their mean, divided by their deviation; the class reads them as they are."""

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        weight, bias = x
        # W x + b with x = std z + mean, for standardized z
        return [weight * std, bias + weight @ mean]

    def to_hf(x: Sequence[Tensor]) -> Sequence[Tensor]:
        weight, bias = x
        folded = weight / std.to(weight.device)
        return [folded, bias - folded @ mean.to(weight.device)]

    names = [[f"{name}.{kind}" for kind in ("weight", "bias")] for name in (hf, ours)]
    return TensorRule(tuple(names[0]), tuple(names[1]), to_ours, to_hf)


DECISION_TRANSFORMER = ModelFamily(
    title="Decision Transformer",
    model_types=("decision_transformer",),
    recipe="decision-transformer",
    prefix="",
    config_rules=(
        ConfigRule(lambda config: {}, _refuse_unless_decision),
        rules.fixed(activation_function="relu", layer_norm_epsilon=1e-5, scale_attn_weights=True),
        rules.fixed(scale_attn_by_inverse_layer_idx=False, add_cross_attention=False, n_positions=DECISION_POSITIONS),
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
        rules.size("window", "window", DECISION_WINDOW),
        rules.size("max_ep_len", "max_episode_length", 4096),
    ),
    tensor_rules=_decision_tensor_rules,
    left_out={
        r"encoder\.h\.\d+\.attn\.(masked_)?bias": "a causal mask, which older versions stored",
        r"predict_(state|return)\.(weight|bias)": "predictions of observations and returns, which no action needs",
        r"encoder\.wte\.weight": "an embedding of text, which is not used",
    },
)
"""The class adds the first row of a table of positions to all tokens, here `offset`, and does not store the window."""

FAMILIES = (GPT2, DECISION_TRANSFORMER)
