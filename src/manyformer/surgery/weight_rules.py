"""Rules by which tensors of a converted model follow from trained ones."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from manyformer.attention import Attention
from manyformer.errors import UserError
from manyformer.feedforward import FeedForward, GatedFeedForward
from manyformer.kernels import Kernel
from manyformer.mixers.global_local import GlobalLocalAttention
from manyformer.position import LearnedPosition
from manyformer.surgery.model_pair import DerivedTensor, ModelPair, rename_layer


def repeated_positions(pair: ModelPair, name: str) -> DerivedTensor | None:
    """The rows of a table of positions, repeated until the longer table is full (Beltagy et al. 2020, section 5)."""
    table = pair.trained(name)
    if table is None or not isinstance(pair.target.get_submodule(name.rpartition(".")[0]), LearnedPosition):
        return None
    rows = len(pair.initial[name])
    if rows < len(table):
        return DerivedTensor(table[:rows], f"the first {rows:,} of {len(table):,} positions")
    return DerivedTensor(table.repeat(-(-rows // len(table)), 1)[:rows], f"{len(table):,} positions, repeated")


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


def copied_global_projections(pair: ModelPair, name: str) -> DerivedTensor | None:
    """The projections of Longformer's global tokens: those of all tokens (Beltagy et al. 2020, section 5)."""
    path, mark, part = name.rpartition(".global_")
    if not mark or not isinstance(pair.target.get_submodule(path), GlobalLocalAttention):
        return None
    projection = pair.trained(f"{path}.{part}")
    if projection is None:
        return None
    return DerivedTensor(projection, "copies of the projections of all tokens")


def added_gate_rows(pair: ModelPair, name: str) -> DerivedTensor | None:
    """A projection of keys and values with new rows: the gates of a kernel that has them, the last of each head."""
    loaded = pair.trained(name)
    layer = _projecting_attention(name, pair.new_modules)
    if loaded is None or layer is None or not layer.kernel.gate_dim or layer.kernel.gate_projection is not None:
        return None
    heads, key_dim, value_dim = layer.kv_shape
    rows = torch.arange(heads * value_dim).view(heads, value_dim)[:, : value_dim - layer.kernel.gate_dim]
    rows = torch.cat([torch.arange(heads * key_dim), heads * key_dim + rows.flatten()])
    if len(rows) != len(loaded):
        return None
    return DerivedTensor(pair.initial[name].index_copy(0, rows, loaded.to(pair.initial[name])), "rows of gates are new")


def _projecting_attention(name: str, modules: Mapping[str, nn.Module]) -> Attention | None:
    """The attention whose projection of keys and values has the tensor `name`; None for other tensors."""
    layer = modules.get(name.rpartition(".kv_proj.")[0])
    if isinstance(layer, Attention):
        return layer
    return None


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
    number = places[0] * (distance * len(places) - 1) // max(1, distance - 1)
    return DerivedTensor(pair.tensors[rename_layer(name, number)], "of layers at even distances, the others are left")


def silent_layers(pair: ModelPair, name: str) -> DerivedTensor | None:
    """Nothing, for the last projection of both branches of an inserted layer: it changes no output at first."""
    if not pair.is_silent(name):
        return None
    path, _, part = name.rpartition(".")[0].rpartition(".")
    module = pair.target.get_submodule(path)
    is_last = (isinstance(module, Attention) and part == "out_proj") or (
        isinstance(module, FeedForward | GatedFeedForward) and part == "down"
    )
    if is_last:
        return DerivedTensor(torch.zeros_like(pair.initial[name]), "0, so that new layers write nothing")
    return None


SHAPE_RULES = (repeated_positions, added_gate_rows, pooled_key_heads)
"""Rules for tensors that have another shape in the old model."""


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


def _pool(rows: Tensor, heads: int, old_heads: int, pooling: str) -> Tensor:
    groups = rows.view(heads, old_heads // heads, -1, *rows.shape[1:])
    return (groups.mean(1) if pooling == "mean" else groups[:, 0]).flatten(0, 1)
