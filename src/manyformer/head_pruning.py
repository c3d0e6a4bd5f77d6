"""Removal of attention heads from a model, and the text that records it."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from manyformer.errors import UserError, suggest_names
from manyformer.head_gates import MultiHeadLayer, attention_heads
from manyformer.head_selection import PerHeadTensors

RemovedHeads = Mapping[str, Sequence[int]]
"""The numbers of removed heads, from 0, for each layer by its name in `attention_heads`."""


def remove_heads(model: nn.Module, removed: RemovedHeads) -> None:
    """Remove heads with all their weights from `model`, in place; its outputs are those with their gates at 0.

    A layer without any head left becomes the bias of its output projection. What layers share, such as a table of
    biases by distance, is copied for a layer that loses heads. Raises UserError for heads that do not exist or cannot
    be removed."""
    layers = attention_heads(model)
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
