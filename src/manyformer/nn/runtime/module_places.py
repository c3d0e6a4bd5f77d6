"""One place for each module: what several places share are the tensors.

`torch.func.functional_call` exchanges the weights of a module by each of its names, and cannot put them back where one
module has two; other tools name a module once and act on it twice. A model therefore has a module of its own in each
place, and these share their parameters and buffers, which such tools know.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple, final

from torch import Tensor, nn

from manyformer.base.errors import UserError

ORIGINAL = "original"
"""The attribute of a module of a further place that holds the module of the first."""


class TensorPlace(NamedTuple):
    """A parameter or a buffer as a module holds it."""

    module: nn.Module
    name: str
    is_buffer: bool

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """The dictionary of the module that it is in."""
        if self.is_buffer:
            return self.module._buffers
        return self.module._parameters  # type: ignore[return-value]


@final
class SharedTable:
    """What modules of several places have computed from settings that are the same in each.

    It is no buffer: converting a model to another dtype must not round a table."""

    def __init__(self) -> None:
        self.table: Tensor | None = None


def separate_places(root: nn.Module) -> None:
    """Put a module of its own, with the same tensors, into each further place of a module inside of `root`.

    State dicts have the names that they had, and outputs do not change."""
    parts: list[object] = [*root.parameters(), *root.buffers(), *root.modules()]
    _separate_children(root, {id(part): part for part in parts}, {root})


def _separate_children(module: nn.Module, identities: dict[int, object], placed: set[nn.Module]) -> None:
    for name, child in module._modules.items():
        if child is None:
            continue
        if child in placed:
            twin = _copy_with_same_tensors(child, identities)
            module._modules[name] = twin
            placed.update(twin.modules())
        else:
            placed.add(child)
            _separate_children(child, identities, placed)


def _copy_with_same_tensors(module: nn.Module, identities: dict[int, object]) -> nn.Module:
    """A copy of a module; its tensors, tables, and modules that it only refers to, are the same objects."""
    memo = dict(identities)
    for part in module.modules():
        del memo[id(part)]
        memo |= {id(value): value for value in vars(part).values() if isinstance(value, SharedTable)}
    further = copy.deepcopy(module, memo)
    for part, original in zip(further.modules(), module.modules()):
        # no part of it, only known to it
        part.__dict__[ORIGINAL] = original
    return further


def check_shared(root: nn.Module) -> None:
    """Raise UserError where a weight that modules of several places share has become several weights."""
    for name, module in root.named_modules():
        original: nn.Module | None = module.__dict__.get(ORIGINAL)
        if original is None:
            continue
        for weight_name, weight in module._parameters.items():
            if original._parameters.get(weight_name, weight) is not weight:
                raise UserError(
                    f"{name}.{weight_name} is shared by several layers, and fully_shard has divided it in each by "
                    "itself: in place of fully_shard, call manyformer.training.parallel_strategies.shard_model(model)"
                )


def shared_tensors(root: nn.Module) -> list[list[TensorPlace]]:
    """All places of each parameter and each buffer that has several."""
    places: dict[int, list[TensorPlace]] = {}
    for place, tensor in _tensor_places(root):
        places.setdefault(id(tensor), []).append(place)
    return [shared for shared in places.values() if len(shared) > 1]


def _tensor_places(root: nn.Module) -> Iterator[tuple[TensorPlace, Tensor]]:
    for module in root.modules():
        for is_buffer, tensors in ((False, module._parameters), (True, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield TensorPlace(module, name, is_buffer), tensor


def share_again(shared: list[list[TensorPlace]]) -> None:
    """Give all places of `shared_tensors` the tensor of the first one, after something has replaced each by its own."""
    for first, *further in shared:
        for place in further:
            if place.name in place.tensors and first.name in first.tensors:
                place.tensors[place.name] = first.tensors[first.name]
