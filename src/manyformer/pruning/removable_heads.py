"""The heads of a model that can be removed, and the order in which they are."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.attention.attention import MultiHeadLayer
from manyformer.attention.head_gates import attention_heads, layers_of_part
from manyformer.errors import UserError


class HeadUnit(NamedTuple):
    """Heads of a layer that are removed together: one head, or all those that share keys and values."""

    layer: str
    heads: tuple[int, ...]


class RemovableHeads(NamedTuple):
    """The units of the layers to prune, and the layers among them that need at least one head."""

    units: tuple[HeadUnit, ...]
    needed_layers: frozenset[str]

    @property
    def minimum(self) -> int:
        """The least number of heads that can remain."""
        return sum(len(next(unit for unit in self.units if unit.layer == name).heads) for name in self.needed_layers)

    def least_important(
        self, importance: Mapping[str, Float[Tensor, " h"]], removed: Sequence[HeadUnit], *, keep: int, step: int
    ) -> list[HeadUnit]:
        """The units to remove next: at most `step` heads, or one unit, of least importance; `keep` heads remain."""
        chosen: list[HeadUnit] = []
        candidates = [unit for unit in self.units if unit not in removed]
        for layer, numbers in importance.items():
            if not numbers.isfinite().all():
                problem = f"the importance of the heads of {layer} is no finite number"
                raise UserError(f"{problem}: heads cannot be ranked by it; look at the weights and the validation data")
        for unit in sorted(candidates, key=lambda unit: float(importance[unit.layer][list(unit.heads)].mean())):
            remaining = [other for other in candidates if other not in (*chosen, unit)]
            is_last = unit.layer in self.needed_layers and all(other.layer != unit.layer for other in remaining)
            is_within_step = not chosen or count_heads((*chosen, unit)) <= step
            if not is_last and is_within_step and count_heads(remaining) >= keep:
                chosen.append(unit)
        return chosen


def removable_heads(model: nn.Module, part: str | None) -> RemovableHeads:
    """The heads of the layers whose names begin with `part`, such as "encoder"; None means all.

    Raises UserError where the model has no such heads."""
    layers = layers_of_part(model, part)
    units = (
        HeadUnit(name, tuple(range(first, first + layer.head_group)))
        for name, layer in layers.items()
        for first in range(0, layer.heads, layer.head_group)
    )
    return RemovableHeads(tuple(units), frozenset(name for name, layer in layers.items() if _needs_heads(layer)))


def _needs_heads(layer: MultiHeadLayer) -> bool:
    try:
        layer.without_heads()
    except ValueError:
        return True
    return False


def count_heads(units: Sequence[HeadUnit]) -> int:
    """The number of heads of these units."""
    return sum(len(unit.heads) for unit in units)


def heads_by_layer(units: Sequence[HeadUnit]) -> dict[str, tuple[int, ...]]:
    """The numbers of all heads of these units, by layer."""
    layers = dict.fromkeys(unit.layer for unit in units)
    return {layer: tuple(sorted(h for unit in units if unit.layer == layer for h in unit.heads)) for layer in layers}


def closed_gates(model: nn.Module, units: Sequence[HeadUnit]) -> dict[str, Float[Tensor, " h"]]:
    """Gates for `gated_heads` that switch the heads of these units off."""
    layers = attention_heads(model)
    gates = dict[str, Tensor]()
    for name, heads in heads_by_layer(units).items():
        gates[name] = torch.ones(layers[name].heads)
        gates[name][list(heads)] = 0
    return gates
