"""The Decision Transformer of Hugging Face's `transformers`: its weights in, and ours out."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyformer.errors import UserError
from manyformer.models import DecisionTransformer
from manyformer.models.bounded_action_head import BoundedActionHead
from manyformer.recipes import build

if TYPE_CHECKING:
    from transformers import DecisionTransformerModel

REQUIRED_CONFIG: Mapping[str, Any] = {
    "activation_function": "relu",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""The settings of a `DecisionTransformerConfig` that the recipe cannot have otherwise."""

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""The matrices of GPT-2, which are stored as (inputs, outputs)."""

EMBEDDINGS = {
    "embed_timestep": "embed.timestep",
    "embed_return": "embed.embed_return",
    "embed_state": "embed.embed_observation",
    "embed_action": "embed.embed_action",
    "embed_ln": "embed.norm",
    "encoder.ln_f": "body.norm.inner",
}
PARAMETERS = ("weight", "bias")
LAYER_PARTS = {
    "ln_1": "attention.pre_norm",
    "attn.c_proj": "attention.inner.out_proj",
    "ln_2": "ff.pre_norm",
    "mlp.c_fc": "ff.inner.up",
    "mlp.c_proj": "ff.inner.down",
}


def import_decision_transformer(model: "DecisionTransformerModel", *, window: int = 20) -> DecisionTransformer:
    """The recipe `decision-transformer` with the weights of a Hugging Face `DecisionTransformerModel`.

    Actions are continuous from -1 to 1 if the model ends in tanh, else logits of discrete actions, which it reads as
    one-hot vectors. The vector of position 0, which Hugging Face adds to all tokens, becomes the `offset`. The heads
    for states and returns have no equal here and do not change the actions. `window` is the number of time steps that
    an action depends on, which the model does not store. Raises UserError for settings that the recipe does not have.
    """
    config, weights = model.config, model.state_dict()
    for name, required in REQUIRED_CONFIG.items():
        if (value := getattr(config, name)) != required:
            raise UserError(f"the model has {name} {value}, and decision-transformer only {required}")
    position = weights["encoder.wpe.weight"][0]
    imported = build(
        "decision-transformer",
        observations=config.state_dim,
        actions=config.act_dim,
        continuous=config.action_tanh,
        dim=config.hidden_size,
        depth=config.n_layer,
        heads=config.n_head,
        ff_dim=config.n_inner,
        dropout=config.resid_pdrop,
        window=window,
        max_episode_length=config.max_ep_len,
        offset=bool(position.any()),
    )
    assert isinstance(imported, DecisionTransformer)
    converted = {
        own_name: weights[name].T if name.endswith(TRANSPOSED) else weights[name]
        for name, own_name in _equal_tensors(imported).items()
    }
    for name, (queries, keys_values) in _fused_projections(imported).items():
        fused = weights[name].T if weights[name].ndim == 2 else weights[name]
        parts = fused.split([config.hidden_size, 2 * config.hidden_size])
        converted[queries], converted[keys_values] = parts
    if imported.embed.offset is not None:
        converted["embed.offset"] = position
    imported.load_state_dict(imported.state_dict() | converted)
    return imported.train(model.training)


def export_decision_transformer(model: DecisionTransformer) -> "DecisionTransformerModel":
    """A Hugging Face `DecisionTransformerModel` that predicts the same actions; `save_pretrained` writes it.

    It reads returns and observations as they are: their scale becomes part of the embedding. Its heads for states and
    returns, which `model` does not have, are 0. Raises UserError for a model that it cannot be equal to, and where
    `transformers` is not installed."""
    _check_exportable(model)
    try:
        from transformers import DecisionTransformerConfig, DecisionTransformerModel
    except ImportError:
        raise UserError("this needs the package transformers: pip install 'manyformer[hf]'") from None
    keywords = model.spec.keywords
    config = DecisionTransformerConfig(
        state_dim=keywords["observations"],
        act_dim=keywords["actions"],
        hidden_size=keywords["dim"],
        n_layer=keywords["depth"],
        n_head=keywords["heads"],
        n_inner=keywords["ff_dim"],
        max_ep_len=keywords["max_episode_length"],
        action_tanh=model.has_bounded_actions,
        resid_pdrop=keywords["dropout"],
        embd_pdrop=keywords["dropout"],
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    exported: Any = DecisionTransformerModel(config)
    exported.to(next(model.parameters()))
    weights = {name: torch.zeros_like(weight) for name, weight in exported.state_dict().items()}
    own = _with_folded_scales(model)
    for name, own_name in _equal_tensors(model).items():
        weights[name] = own[own_name].T if name.endswith(TRANSPOSED) else own[own_name]
    for name, parts in _fused_projections(model).items():
        fused = torch.cat([own[part] for part in parts])
        weights[name] = fused.T if fused.ndim == 2 else fused
    if model.embed.offset is not None:
        weights["encoder.wpe.weight"][0] = own["embed.offset"]
    exported.load_state_dict(weights)
    trained: DecisionTransformerModel = exported.train(model.training)
    return trained


def _check_exportable(model: DecisionTransformer) -> None:
    """Raise UserError for a model that Hugging Face's class cannot be equal to."""
    keywords = model.spec.keywords
    if keywords["body"] is not None:
        raise UserError(f"body is {keywords['body']}, and Hugging Face's Decision Transformer has GPT-2's layers alone")
    if not keywords["returns"]:
        raise UserError("this model has no returns (returns=false), and Hugging Face's Decision Transformer needs them")
    if isinstance(model.head, BoundedActionHead) and not ((model.head.low == -1) & (model.head.high == 1)).all():
        raise UserError(
            f"actions are from {model.head.low.tolist()} to {model.head.high.tolist()}, and those of Hugging Face's "
            "Decision Transformer from -1 to 1"
        )


def _equal_tensors(model: DecisionTransformer) -> dict[str, str]:
    """From the names of Hugging Face's tensors to those that are equal here, but for a transposition."""
    head = "head.project" if model.has_bounded_actions else "head"
    modules = EMBEDDINGS | {"predict_action.0": head}
    for layer in range(model.spec.keywords["depth"]):
        modules |= {f"encoder.h.{layer}.{part}": f"body.{layer}.{own_part}" for part, own_part in LAYER_PARTS.items()}
    names = {f"{name}.{kind}": f"{own_name}.{kind}" for name, own_name in modules.items() for kind in PARAMETERS}
    return {name: own_name for name, own_name in names.items() if name != "embed_timestep.bias"}


def _fused_projections(model: DecisionTransformer) -> dict[str, list[str]]:
    """From the names of Hugging Face's projections to the names of their parts here: queries, keys with values."""
    return {
        f"encoder.h.{layer}.attn.c_attn.{kind}": [
            f"body.{layer}.attention.inner.{part}.{kind}" for part in ("q_proj", "kv_proj")
        ]
        for layer in range(model.spec.keywords["depth"])
        for kind in PARAMETERS
    }


def _with_folded_scales(model: DecisionTransformer) -> dict[str, Tensor]:
    """The weights of a model that reads returns divided by 1 and observations as they are."""
    embed, weights = model.embed, dict(model.state_dict())
    observed = "embed.embed_observation"
    weights[f"{observed}.bias"] = embed.embed_observation(-embed.mean / embed.std).detach()
    weights[f"{observed}.weight"] = embed.embed_observation.weight.detach() / embed.std
    weights["embed.embed_return.weight"] = weights["embed.embed_return.weight"] / embed.return_scale
    return weights
