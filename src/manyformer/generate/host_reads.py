"""What a captured step must not do: read numbers of tensors, or bring numbers of the host to the device."""

from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor, nn

from manyformer.sources.static_cache import NotStaticError
from manyformer.torch_internals import TorchDispatchMode, tree_leaves

READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Operators whose numbers or shapes depend on the content of tensors."""


@final
class StaticOperatorsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises NotStaticError at the first operator that a captured graph could not replay.

    On a CPU it refuses what would have to wait for a GPU or be copied to one, so that the answer is the same."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.index:
            index = args[1]
        else:
            index = ()
        reads_values = any(tag in func.tags for tag in READS_VALUES) and func.overloadpacket is not torch.ops.aten.index
        if reads_values or any(ids is not None and ids.dtype == torch.bool for ids in index):
            raise NotStaticError(f"the host reads what {func} finds in tensors")
        if func.overloadpacket is torch.ops.aten.lift_fresh:
            raise NotStaticError("numbers of the host are made a tensor at every step")
        out = func(*args, **(kwargs or {}))
        devices = {leaf.device for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)}
        if len(devices) > 1:
            raise NotStaticError(f"{func} moves numbers between {' and '.join(sorted(map(str, devices)))}")
        return out


def module_of(traceback: TracebackType | None) -> str:
    """The type of the innermost module in which an exception was raised, with a space; "" outside all modules."""
    name = ""
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            name = f"{type(owner).__name__}: "
        traceback = traceback.tb_next
    return name


@final
class OuterTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the tensors that operators read although none of them made it: weights, tables, caches, inputs.

    A captured graph reads them at their addresses, so they must exist as long as it does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._add(leaf, is_outer=True)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._add(leaf, is_outer=False)
        return out

    def _add(self, leaf: Any, *, is_outer: bool) -> None:
        if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()._cdata) not in self._storages:
            self._storages.add(storage)
            if is_outer:
                self.tensors.append(leaf)
