"""Removal of attention heads from a model, and the text that records it."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from manyformer.errors import UserError, suggest_names
from manyformer.head_selection import PerHeadTensors
from manyformer.multi_head.head_gates import MultiHeadLayer, attention_heads

RemovedHeads = Mapping[str, Sequence[int]]
"""The numbers of removed heads, from 0, for each layer by its name in `attention_heads`."""


def remove_heads(model: nn.Module, removed: RemovedHeads) -> None:
    """Remove heads with all their weights from `model`, in place; its outputs are those with their gates at 0.

    A layer without any head left becomes the bias of its output projection. What layers share, such as a table of
    biases by distance, is copied for a layer that loses heads. Raises UserError for heads that do not exist or cannot
    be removed."""
    layers = attention_heads(model)
    if removed and not layers:
        raise UserError("no layer of this model has heads that an output projection joins, so none can be removed")
    for name, heads in removed.items():
        if name not in layers:
            raise UserError(f"there is no layer '{name}' with heads; {suggest_names(name, layers)}")
        if unknown := sorted(head for head in heads if not 0 <= head < layers[name].heads):
            raise UserError(f"{name} has no head {unknown[0]}: its {layers[name].heads} heads are numbered from 0")
    layer_counts = Counter(module for layer in layers.values() for module in layer.modules())
    for name, heads in removed.items():
        remaining = [head for head in range(layers[name].heads) if head not in heads]
        if len(remaining) == layers[name].heads:
            continue
        try:
            if remaining:
                _copy_shared(layers[name], layer_counts)
                layers[name].keep_heads(remaining)
            else:
                _replace(model, layers[name])
        except ValueError as error:
            raise UserError(f"heads {', '.join(map(str, heads))} of {name} cannot be removed: {error}") from error


def layers_of_part(model: nn.Module, part: str | None) -> dict[str, MultiHeadLayer]:
    """The layers with heads whose names begin with `part`, such as "encoder"; None means all.

    Raises UserError where there is none."""
    layers = attention_heads(model)
    selected = {name: layer for name, layer in layers.items() if part is None or f"{name}.".startswith(f"{part}.")}
    if not layers:
        raise UserError(
            "this model has no layer in which an output projection joins attention heads: none can be pruned"
        )
    if not selected:
        prefixes = sorted({name.partition(".")[0] for name in layers}) + list(layers)
        raise UserError(f"there is no part '{part}' with attention heads; {suggest_names(str(part), prefixes)}")
    return selected


def _copy_shared(layer: MultiHeadLayer, layer_counts: Counter[nn.Module]) -> None:
    """Replace the modules with tensors for each head that other layers have, too, by copies."""
    for parent in list(layer.modules()):
        for name, child in parent.named_children():
            if isinstance(child, PerHeadTensors) and child.differs_by_head and layer_counts[child] > 1:
                setattr(parent, name, copy.deepcopy(child))


def _replace(model: nn.Module, layer: MultiHeadLayer) -> None:
    """Replace a layer by what remains of it without heads, in all places that it has."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is layer:
                setattr(parent, name, layer.without_heads())


def format_heads(removed: RemovedHeads) -> str:
    """The text for `parse_heads`, such as `encoder.0.attention:1,3 encoder.2.attention:0`."""
    return " ".join(f"{name}:{','.join(map(str, sorted(heads)))}" for name, heads in removed.items() if heads)


def parse_heads(text: str) -> dict[str, tuple[int, ...]]:
    """The heads of each layer that `text` names. Raises UserError for a text that `format_heads` does not write."""
    removed: dict[str, tuple[int, ...]] = {}
    for entry in text.split():
        name, _, numbers = entry.partition(":")
        heads = numbers.split(",")
        if not name or name in removed or not all(head.isdecimal() and len(head) < 5 for head in heads):
            raise UserError(
                f"removed_heads ('{entry:.60}') must be layers with numbers of heads, such as "
                "'encoder.0.attention:1,3 encoder.2.attention:0', each layer once"
            )
        removed[name] = tuple(sorted(set(map(int, heads))))
    return removed


def add_heads(earlier: RemovedHeads, removed: RemovedHeads) -> dict[str, tuple[int, ...]]:
    """All heads that a model lacks that lacked `earlier` and lost `removed`, numbered as they were at first.

    The numbers of `removed` are those of the model without `earlier`."""
    total = {name: tuple(heads) for name, heads in earlier.items()}
    for name, heads in removed.items():
        gone = total.get(name, ())
        remaining = [head for head in range(max(heads, default=0) + len(gone) + 1) if head not in gone]
        total[name] = tuple(sorted({*gone, *(remaining[head] for head in heads)}))
    return total


def subtract_heads(total: RemovedHeads, earlier: RemovedHeads) -> dict[str, tuple[int, ...]]:
    """What a model without `earlier` must lose to lack `total`: the inverse of `add_heads`.

    Raises UserError where it lacks other heads already."""
    for name, heads in earlier.items():
        if missing := sorted(set(heads) - set(total.get(name, ()))):
            raise UserError(f"{name} has no head {missing[0]} any more: it was removed earlier")
    removed = {name: sorted(set(heads) - set(earlier.get(name, ()))) for name, heads in total.items()}
    return {
        name: tuple(head - sum(gone < head for gone in earlier.get(name, ())) for head in heads)
        for name, heads in removed.items()
        if heads
    }
