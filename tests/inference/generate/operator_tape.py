"""A stand-in for CUDA graphs on a CPU: operators are recorded once, and replayed on the same tensors."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storages_of(tree: Any) -> dict[int, Any]:
    """The storages of all tensors in a tree, by their identity."""
    storages = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in storages}


class TapeGraph(TorchDispatchMode):
    """Like a captured graph, it runs nothing when it is recorded, and all numbers of Python stay as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.outer: dict[int, tuple[Any, Any]] = {}
        self.inner: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for identity, storage in storages_of((args, kwargs)).items():
            if identity not in self.inner and identity not in self.outer:
                self.outer[identity] = storage, storage.clone()
        out = func(*args, **kwargs)
        self.inner |= {key: value for key, value in storages_of(out).items() if key not in self.outer}
        self.calls.append((func, args, kwargs, out))
        return out

    def forget_numbers(self) -> None:
        """Undo what recording has written, and fill what it has made with nan."""
        for storage, numbers in self.outer.values():
            storage.copy_(numbers)
        for *_, out in self.calls:
            for leaf in tree_leaves(out):
                if (
                    isinstance(leaf, Tensor)
                    and leaf.is_floating_point()
                    and leaf.untyped_storage()._cdata in self.inner
                ):
                    leaf.fill_(torch.nan)

    def replay(self) -> None:
        """Run the operators; what they return goes where the recorded ones have put it."""
        for func, args, kwargs, out in self.calls:
            inputs = storages_of((args, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage()._cdata not in inputs:
                    old.copy_(new)


class TapeEngine:
    """`GraphEngine` whose graphs are tapes; `events` are its calls in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self.events.append("side stream")
        yield

    def graph(self) -> TapeGraph:
        self.events.append("graph")
        return TapeGraph()

    def capture(self, graph: Any) -> AbstractContextManager[Any]:
        return self._capture(graph)

    @contextmanager
    def _capture(self, graph: TapeGraph) -> Iterator[None]:
        self.events.append("capture")
        with graph:
            yield
        graph.forget_numbers()
