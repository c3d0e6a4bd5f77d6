"""The tensors of a converted model: copied, derived by a rule, or new; none is left unexplained.

First the transfer of all tensors, then the rules that derive single ones, then sentences on what a conversion changes
besides weights: kernels, positions, masks and activations."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.conversion.surgery.conversion import (
    DerivedTensor,
    ModelPair,
    RecipeConversion,
    TensorOrigin,
    rename_layer,
    tensors_by_place,
)
from manyformer.models.model_files import read_spec
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.global_local import GlobalLocalAttention
from manyformer.nn.feed_forward.feedforward import FeedForward, GatedFeedForward
from manyformer.nn.kernels.kernel import Kernel
from manyformer.nn.positions import LearnedPosition, Position
from manyformer.nn.residual import AddJoin
from manyformer.nn.runtime.dropout import Dropout
from manyformer.recipes.parts.registry import build_on_meta, recipe_names


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
    for name, placed in tensors_by_place(pair.target, keep_vars=True).items():
        names_of_storage.setdefault(id(placed), []).append(name)
    for names in names_of_storage.values():
        # a tied weight may be known by any of its names
        name = next((name for name in names if pair.trained(name) is not None), names[0])
        values[name], origin = _derive(pair, conversion, name)
        trained = {other: tensor for other in names if (tensor := pair.trained(other)) is not None}
        different = [other for other, tensor in trained.items() if not _equal(tensor, trained[name])]
        # a layer that is applied several times is made of different layers, which is what its rule is for
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
    # a rule may answer with a tensor of another shape, which then is no answer
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


def shared_layers(pair: ModelPair, name: str) -> DerivedTensor | None:
    """A tensor of a layer that is applied in several places: the mean of those in its places, or that of one layer.

    Raises UserError if the model has another number of layers than the new one has places."""
    places = pair.shared_places(name)
    if places and pair.layers:
        raise UserError(f"depth times loops ({len(pair.layers)}) must be the number of layers of the model")
    tensors = [tensor for place in places if (tensor := pair.tensors.get(rename_layer(name, place))) is not None]
    if not tensors or len(tensors) < len(places) or all(torch.equal(tensor, tensors[0]) for tensor in tensors):
        return None
    if pair.options.sharing == "mean":
        return DerivedTensor(torch.stack(tensors).mean(0), f"the mean of {len(places)} layers, which become one")
    distance = places[1] - places[0]
    # the new layers spread evenly over the old ones, of which the first and the last are among them
    number = places[0] * (distance * len(places) - 1) // max(1, distance - 1)
    return DerivedTensor(pair.tensors[rename_layer(name, number)], "of layers at even distances, the others are left")


def silent_layers(pair: ModelPair, name: str) -> DerivedTensor | None:
    """Nothing, for the last projection of both branches of an inserted layer: it changes no output at first."""
    if not pair.is_silent(name):
        return None
    path, _, part = name.rpartition(".")[0].rpartition(".")
    module = pair.new_modules[path]
    is_last = (isinstance(module, Attention) and part == "out_proj") or (
        isinstance(module, FeedForward | GatedFeedForward) and part == "down"
    )
    if is_last:
        return DerivedTensor(torch.zeros_like(pair.initial[name]), "0, so that new layers write nothing")
    return None


def repeated_positions(pair: ModelPair, name: str) -> DerivedTensor | None:
    """The rows of a table of positions, repeated until the longer table is full (Beltagy et al. 2020, section 5)."""
    table = pair.trained(name)
    if table is None or not isinstance(pair.new_modules[name.rpartition(".")[0]], LearnedPosition):
        return None
    rows = len(pair.initial[name])
    # learned positions of a shorter text are its first ones
    if rows < len(table):
        return DerivedTensor(table[:rows], f"the first {rows:,} of {len(table):,} positions")
    return DerivedTensor(table.repeat(-(-rows // len(table)), 1)[:rows], f"{len(table):,} positions, repeated")


def added_gate_rows(pair: ModelPair, name: str) -> DerivedTensor | None:
    """A projection of keys and values with new rows: the gates of a kernel that has them, the last of each head."""
    loaded = pair.trained(name)
    layer = _projecting_attention(name, pair.new_modules)
    if loaded is None or layer is None or not layer.kernel.gate_dim or layer.kernel.gate_projection is not None:
        return None
    heads, key_dim, value_dim = layer.kv_shape
    # (heads, values): gates stand behind the values of each head, so the old rows are not contiguous
    rows = torch.arange(heads * value_dim).view(heads, value_dim)[:, : value_dim - layer.kernel.gate_dim]
    rows = torch.cat([torch.arange(heads * key_dim), heads * key_dim + rows.flatten()])
    if len(rows) != len(loaded):
        return None
    return DerivedTensor(pair.initial[name].index_copy(0, rows, loaded.to(pair.initial[name])), "rows of gates are new")


def pooled_key_heads(pair: ModelPair, name: str) -> DerivedTensor | None:
    """Fewer heads of keys and values: the mean, or the first, of those that each new one replaces."""
    rows = pair.trained(name)
    layer = _projecting_attention(name, pair.new_modules)
    old_layer = _projecting_attention(pair.old_name(name), pair.modules)
    if rows is None or layer is None or old_layer is None:
        return None
    (heads, *widths) = layer.kv_shape
    (old_heads, *old_widths) = old_layer.kv_shape
    if heads == old_heads or widths != old_widths:
        return None
    if old_heads % heads:
        raise UserError(f"kv_heads ({heads}) must divide the {old_heads} heads of keys and values of the model")
    parts = torch.split(rows, [old_heads * width for width in widths])
    pooled = torch.cat([_pool(part, heads, old_heads, pair.options.pooling) for part in parts])
    chosen = "the first"
    if pair.options.pooling == "mean":
        chosen = "the mean"
    return DerivedTensor(pooled, f"{chosen} of every {old_heads // heads} heads of keys and values")


def _projecting_attention(name: str, modules: Mapping[str, nn.Module]) -> Attention | None:
    """The attention whose projection of keys and values has the tensor `name`; None for other tensors."""
    layer = modules.get(name.rpartition(".kv_proj.")[0])
    if isinstance(layer, Attention):
        return layer
    return None


def _pool(rows: Tensor, heads: int, old_heads: int, pooling: str) -> Tensor:
    groups = rows.view(heads, old_heads // heads, -1, *rows.shape[1:])
    return (groups.mean(1) if pooling == "mean" else groups[:, 0]).flatten(0, 1)


SHAPE_RULES = (repeated_positions, added_gate_rows, pooled_key_heads)
"""Rules for tensors that have another shape in the old model."""


def copied_global_projections(pair: ModelPair, name: str) -> DerivedTensor | None:
    """The projections of Longformer's global tokens: those of all tokens (Beltagy et al. 2020, section 5)."""
    path, mark, part = name.rpartition(".global_")
    if not mark or not isinstance(pair.new_modules[path], GlobalLocalAttention):
        return None
    projection = pair.trained(f"{path}.{part}")
    if projection is None:
        return None
    return DerivedTensor(projection, "copies of the projections of all tokens")


def is_of_new_kernel(pair: ModelPair, name: str) -> bool:
    """Whether a tensor of the new model belongs to a kernel of another kind than the old model has there."""
    return _is_of_changed_kernel(name, pair.new_modules, pair.old_module)


def is_of_replaced_kernel(pair: ModelPair, name: str) -> bool:
    """Whether a tensor of the old model belongs to a kernel that the new model has of another kind."""
    return _is_of_changed_kernel(name, pair.modules, pair.new_modules.get)


def _is_of_changed_kernel(
    name: str, modules: Mapping[str, nn.Module], counterpart: Callable[[str], nn.Module | None]
) -> bool:
    """Whether the smallest kernel around a tensor has a kernel of another kind as its counterpart."""
    for path in _paths(name):
        if isinstance(kernel := modules.get(path), Kernel):
            changed = counterpart(path)
            return isinstance(changed, Kernel) and _structure(changed) != _structure(kernel)
    return False


def _paths(name: str) -> list[str]:
    """The names of the modules around a tensor, the smallest first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _structure(module: nn.Module) -> dict[str, type]:
    return {name: type(part) for name, part in module.named_modules()}


def build_saved_structure(folder: Path) -> nn.Module | None:
    """The modules of the model saved in a folder, without memory for weights; None if its recipe is not imported."""
    spec = read_spec(folder)
    if spec.recipe not in recipe_names():
        return None
    # recipes draw random blocks and directions even on the meta device
    with torch.random.fork_rng(devices=[]):
        return build_on_meta(spec.recipe, dict(spec.keywords))


def describe_changes(saved: nn.Module, model: nn.Module, new_part: str | None = None) -> list[str]:
    """A sentence for each kind of module, such as a kernel, a position or an activation, that computes another thing.

    Weights are not compared, nor what has an effect in training alone, nor the modules of a part that is new."""
    saved_modules = dict(saved.named_modules())
    places = dict[tuple[str, str], list[str]]()
    # a mechanism is described with all its parts, which are then not described again
    left_out = tuple(f"{name}." for name, part in model.named_modules() if _is_mechanism(part))
    left_out += () if new_part is None else (new_part,)
    for name, module in model.named_modules():
        is_compared = name and name in saved_modules and not isinstance(module, _WITHOUT_EFFECT)
        if not is_compared or name.startswith(left_out):
            continue
        texts = _describe(saved_modules[name]), _describe(module)
        if texts[0] != texts[1]:
            places.setdefault(texts, []).append(name)
    return [f"{' and '.join(abbreviate(names))}: {old} becomes {new}" for (old, new), names in places.items()]


def abbreviate(names: list[str]) -> list[str]:
    """Names as they are, or the first and how many others there are."""
    if len(names) < 4:
        return names
    return [f"{names[0]}", f"{len(names) - 1} others like it"]


def _describe(module: nn.Module) -> str:
    """The class of a module and what its `extra_repr` says, in one line, for kernels and positions with all parts."""
    if _is_mechanism(module):
        return " ".join(repr(module).split())
    return f"{type(module).__name__}({module.extra_repr()})"


def _is_mechanism(module: nn.Module) -> bool:
    """Whether a module is compared as a whole, not part by part."""
    return isinstance(module, Kernel | Position)


_WITHOUT_EFFECT = (Dropout, AddJoin, nn.Linear, nn.Embedding)
"""Modules whose descriptions differ by dropout, or by shapes, which are compared with the weights."""
