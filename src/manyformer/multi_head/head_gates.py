"""Layers with heads: gates that multiply the outputs of heads, and heads that are removed."""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.errors import UserError, suggest_names
from manyformer.head_selection import HeadSelection, PerHeadTensors
from manyformer.masks import Mask, PerHead


class MultiHeadLayer(Layer, ABC):
    """A layer with heads whose outputs `merge_heads` concatenates for the output projection.

    `head_gates` maps the outputs of all heads (b, h, l, f) to gated ones; None, as built, leaves them as they are.
    """

    heads: int
    out_proj: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.head_gates: nn.Module | None = None

    def merge_heads(self, y: Float[Tensor, "b h l f"]) -> Float[Tensor, "b l hf"]:
        """The outputs of all heads, gated, side by side for each token."""
        gated = y if self.head_gates is None else self.head_gates(y)
        return gated.transpose(1, 2).flatten(2)

    def keep_heads(self, heads: Sequence[int]) -> None:
        """Remove all heads but these, numbers in ascending order, in place; at least one must remain.

        Raises ValueError where the others share keys in a way that cannot remain."""
        selection = self.select_heads(tuple(heads))
        self.select_projections(selection)
        modules = [module for module in self.modules() if module is not self]
        for module in modules:
            if isinstance(module, PerHeadTensors):
                module.keep_heads(selection)
        for module in (self, *modules):
            for name in ("mask", "cache_mask"):
                mask = getattr(module, name, None)
                if isinstance(mask, Mask) and mask.per_head:
                    setattr(module, name, PerHead({n: mask.for_head(head) for n, head in enumerate(heads)}))
        self.heads = len(heads)

    def select_heads(self, heads: tuple[int, ...]) -> HeadSelection:
        """The selection of these heads; every head has its own keys unless a layer says otherwise."""
        return HeadSelection(heads, self.heads, heads, self.heads)

    @property
    def head_group(self) -> int:
        """The number of adjacent heads that can only be removed together."""
        return 1

    def output_projections(self) -> Sequence[nn.Linear]:
        """The linear maps that read the outputs of all heads."""
        return (self.out_proj,)

    @abstractmethod
    def select_projections(self, selection: HeadSelection) -> None:
        """Remove the rows and columns of all other heads from the layer's projections, in place."""

    def without_heads(self) -> Layer:
        """What remains of the layer when no head does: the bias of its output projection.

        Raises ValueError where the layer needs at least one."""
        return HeadlessLayer(self.out_proj)


@final
class HeadlessLayer(Layer):
    """What attention without heads adds to the stream: the bias of its output projection, nothing if it has none."""

    def __init__(self, out_proj: nn.Linear) -> None:
        super().__init__()
        self.dim = out_proj.out_features
        self.bias = out_proj.bias

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        zeros = x.new_zeros(*x.shape[:2], self.dim)
        return LayerOutput(zeros if self.bias is None else zeros + self.bias.to(x.dtype), state)


@final
class ConstantGates(nn.Module):
    """Multiplies the outputs of heads by `gates`, after `inner` if there were gates before.

    `gates` has one number per head, or one per row and head; it gets gradients if it is a parameter."""

    def __init__(self, gates: Float[Tensor, "... h"], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.gates = gates
        self.inner = inner

    def forward(self, y: Float[Tensor, "b h l f"]) -> Float[Tensor, "b h l f"]:
        return (y if self.inner is None else self.inner(y)) * self.gates[..., None, None].to(y)


def attention_heads(model: nn.Module) -> dict[str, MultiHeadLayer]:
    """All layers of `model` with heads, in the order of its modules, by the names that attention maps have.

    A layer that is applied several times, as in a universal transformer, is listed once."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MultiHeadLayer)}
    return {part_name(name): layer for name, layer in layers.items()}


@contextmanager
def gated_heads(model: nn.Module, gates: Mapping[str, Float[Tensor, "... h"]]) -> Iterator[None]:
    """Multiply the outputs of heads inside the block, also in decoding that begins there; 0 switches a head off.

    Michel et al. (2019, arXiv:1905.10650), equation 3. `gates` has for each layer, by its name in `attention_heads`,
    one number per head, or (b, h) for a batch of b rows; layers that are not named stay as they are. For gradients by
    `backward`, gates must be `nn.Parameter`s, which reversible layers need. Raises ValueError for unknown names, wrong
    sizes and other gates that require gradients."""
    layers = attention_heads(model)
    for name, values in gates.items():
        if name not in layers:
            raise ValueError(f"no layer with heads is named '{name}'; there are {', '.join(layers) or 'none'}")
        if values.ndim not in (1, 2) or values.shape[-1] != layers[name].heads:
            shape = tuple(values.shape)
            raise ValueError(f"{name} has {layers[name].heads} heads, but its gates have the shape {shape}")
        if values.requires_grad and not isinstance(values, nn.Parameter):
            raise ValueError(f"the gates of {name} require gradients, so they must be an nn.Parameter")
    previous = {name: layers[name].head_gates for name in gates}
    try:
        for name, values in gates.items():
            layers[name].head_gates = ConstantGates(values, previous[name])
        yield
    finally:
        for name, module in previous.items():
            layers[name].head_gates = module


def part_name(name: str) -> str:
    """A module's name without the segments of wrappers (`inner`, `kernel`)."""
    return ".".join(segment for segment in name.split(".") if segment not in ("inner", "kernel"))


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
