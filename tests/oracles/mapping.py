"""The tensors of other people's models under our names.

Every function is linear in the tensors it is given, so it maps gradients as well as weights, and complete: loading its
result with `load_state_dict(strict=True)` leaves nothing to chance.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyformer.conversion.hugging_face.families import PAD_ID, family_of_type

Tensors = Mapping[str, Tensor]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name."""
    return dict(module.state_dict())


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, zero for what took no part."""
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in module.named_parameters()
    }


def by_family(model_type: str, ours: Any, hf: Tensors, **keywords: Any) -> dict[str, Tensor]:
    """The tensors that `ours` has, by the rules with which models of a type are imported, shared ones under all names.

    `keywords` are those that the rules ask for and its recipe does not have. Tensors that no rule makes are left out,
    which a strict `load_state_dict` refuses."""
    state = ours.state_dict(keep_vars=True)
    values: dict[int, Tensor] = {}
    for rule in family_of_type(model_type).tensor_rules({**ours.spec.keywords, PAD_ID: 1, **keywords}):
        if rule.ours and state.keys() >= set(rule.ours):
            mapped = rule.to_ours([hf[name] for name in rule.hf])
            values |= {id(state[name]): value for name, value in zip(rule.ours, mapped, strict=True)}
    return {name: values[id(tensor)] for name, tensor in state.items() if id(tensor) in values}


def multihead(hf: Tensors) -> dict[str, Tensor]:
    """`torch.nn.MultiheadAttention` as `Attention`: q, k and v are packed in this order."""
    dim = hf["out_proj.bias"].shape[0]
    ours = {}
    for kind in ("weight", "bias"):
        packed = hf[f"in_proj_{kind}"]
        ours |= {
            f"q_proj.{kind}": packed[:dim],
            f"kv_proj.{kind}": packed[dim:],
            f"out_proj.{kind}": hf[f"out_proj.{kind}"],
        }
    return ours


def torch_layer(hf: Tensors, norm: str) -> dict[str, Tensor]:
    """`torch.nn.TransformerEncoderLayer` or `DecoderLayer` as a chain of residual branches.

    `norm` is where the norm of a branch stands: "pre_norm" or "post_norm".
    """
    branches = {"attention": "self_attn", "cross": "multihead_attn"}
    branches = {ours: name for ours, name in branches.items() if f"{name}.in_proj_weight" in hf}
    ours: dict[str, Tensor] = {}
    for number, branch in enumerate([*branches, "ff"], start=1):
        ours |= _renamed(hf, {f"norm{number}": f"{branch}.{norm}"})
    for branch, name in branches.items():
        inner = {key.removeprefix(f"{name}."): value for key, value in hf.items() if key.startswith(f"{name}.")}
        ours |= {f"{branch}.inner.{key}": value for key, value in multihead(inner).items()}
    return ours | _renamed(hf, {"linear1": "ff.inner.up", "linear2": "ff.inner.down"})


def attention_projections(hf: Tensors, old: str, new: str, names: tuple[str, str, str, str]) -> dict[str, Tensor]:
    """Four projections as our three: keys and values are one matrix."""
    ours = {}
    for kind in ("weight", "bias"):
        q, k, v, out = (hf[f"{old}.{name}.{kind}"] for name in names)
        ours |= {f"{new}.q_proj.{kind}": q, f"{new}.kv_proj.{kind}": torch.cat([k, v]), f"{new}.out_proj.{kind}": out}
    return ours


def _renamed(hf: Tensors, names: Mapping[str, str]) -> dict[str, Tensor]:
    return {f"{new}.{kind}": hf[f"{old}.{kind}"] for old, new in names.items() for kind in ("weight", "bias")}


def global_projections(hf: Tensors, old: str, new: str) -> dict[str, Tensor]:
    """The second set of projections of a Longformer layer."""
    ours = {}
    for kind in ("weight", "bias"):
        q, k, v = (hf[f"{old}{name}_global.{kind}"] for name in ("query", "key", "value"))
        ours |= {f"{new}global_q_proj.{kind}": q, f"{new}global_kv_proj.{kind}": torch.cat([k, v])}
    return ours
