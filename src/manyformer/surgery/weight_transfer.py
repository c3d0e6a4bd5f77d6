"""The tensors of a converted model: copied, derived by a rule, or new; none is left unexplained."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from manyformer.errors import UserError
from manyformer.surgery.conversion import RecipeConversion, TensorOrigin
from manyformer.surgery.mechanism_changes import abbreviate
from manyformer.surgery.model_pair import ModelPair
from manyformer.surgery.weight_rules import (
    SHAPE_RULES,
    is_of_new_kernel,
    is_of_replaced_kernel,
    shared_layers,
    silent_layers,
)


class WeightTransfer(NamedTuple):
    """The values of all tensors of the converted model, their origins, and the tensors left behind with the reasons."""

    values: Mapping[str, Tensor]
    origins: list[TensorOrigin]
    left_behind: dict[str, str]


def transfer_weights(pair: ModelPair, conversion: RecipeConversion | None = None) -> WeightTransfer:
    """Derive all tensors of the new model of a pair. Raises UserError for one that nothing explains."""
    values = dict[str, Tensor]()
    origins = list[TensorOrigin]()
    names_of_storage: dict[int, list[str]] = {}
    for name, tensor in pair.target.state_dict(keep_vars=True).items():
        names_of_storage.setdefault(id(tensor), []).append(name)
    for names in names_of_storage.values():
        # a tied weight may be known by any of its names
        name = next((name for name in names if pair.trained(name) is not None), names[0])
        values[name], origin = _derive(pair, conversion, name)
        trained = {other: tensor for other in names if (tensor := pair.trained(other)) is not None}
        different = [other for other, tensor in trained.items() if not _equal(tensor, trained[name])]
        if different and not pair.shared_places(name):
            raise UserError(f"{name} and {different[0]} differ in the model, and are one tensor in the new one")
        origins.append(origin)
    return WeightTransfer(values, origins, _left_behind(pair, conversion))


def adapt_tensors(pair: ModelPair, conversion: RecipeConversion | None = None) -> tuple[dict[str, Tensor], list[str]]:
    """The trained tensors of a pair, with those that rules derive for the new model, and sentences about these.

    Unlike `transfer_weights` it leaves unexplained tensors as they are."""
    tensors = {name: value for name, value in pair.tensors.items() if not is_of_replaced_kernel(pair, name)}
    names_by_origin: dict[str, list[str]] = {}
    for name in pair.initial:
        value, origin = _derive_if_known(pair, conversion, name)
        if value is None or (origin.kind == "copied" and not origin.how):
            continue
        tensors[name] = value
        names_by_origin.setdefault(f"{origin.kind}, {origin.how}", []).append(name)
    return tensors, [f"{how}: {' and '.join(abbreviate(names))}" for how, names in names_by_origin.items()]


def _derive(pair: ModelPair, conversion: RecipeConversion | None, name: str) -> tuple[Tensor, TensorOrigin]:
    """The value of a tensor and its origin. Raises UserError if nothing explains it."""
    value, origin = _derive_if_known(pair, conversion, name)
    if value is not None:
        return value, origin
    trained = pair.trained(name)
    shape = tuple(pair.initial[name].shape)
    if trained is None:
        raise UserError(f"nothing in the model becomes {name}, which the new one has")
    shapes = f"{tuple(trained.shape)} in the model and {shape} in the new one"
    raise UserError(f"{name} has the shape {shapes}, and no rule makes one of the other")


def _derive_if_known(
    pair: ModelPair, conversion: RecipeConversion | None, name: str
) -> tuple[Tensor | None, TensorOrigin]:
    """The value of a tensor and its origin, None if nothing explains it."""
    initial = pair.initial[name]
    trained = pair.trained(name)
    if is_of_new_kernel(pair, name):
        return initial, TensorOrigin(name, "new", "tensors of a kernel of another kind")
    is_same_shape = trained is not None and trained.shape == initial.shape
    for rule in (
        shared_layers,
        silent_layers,
        *(conversion.rules if conversion else ()),
        *(() if is_same_shape else SHAPE_RULES),
    ):
        if (derived := rule(pair, name)) is not None and derived.value.shape == initial.shape:
            return derived.value, TensorOrigin(name, "derived", derived.how)
    if is_same_shape:
        return trained, TensorOrigin(name, "copied", "" if pair.old_name(name) == name else "of layers below")
    reason = _matching(conversion.new if conversion else {}, name)
    return (None if reason is None else initial), TensorOrigin(name, "new", reason or "")


def _left_behind(pair: ModelPair, conversion: RecipeConversion | None) -> dict[str, str]:
    """The tensors that the new model does not have. Raises UserError for one without a reason."""
    used = {pair.old_name(name) for name in pair.initial}
    left_behind = {}
    for name in pair.tensors.keys() - used:
        reason = _matching(conversion.left_behind if conversion else {}, name)
        if reason is None and is_of_replaced_kernel(pair, name):
            reason = "tensors of a kernel of another kind"
        if reason is None:
            raise UserError(f"the new model has no place for {name}")
        left_behind[name] = reason
    return dict(sorted(left_behind.items()))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))


def _matching(reasons: Mapping[str, str], name: str) -> str | None:
    return next((reason for pattern, reason in reasons.items() if re.fullmatch(pattern, name)), None)
