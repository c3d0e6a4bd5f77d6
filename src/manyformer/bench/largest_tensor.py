"""Measure the largest tensor that a computation allocates."""

from typing import Any, final

from torch import Tensor

from manyformer.torch_internals import TorchDispatchMode, tree_leaves


@final
class LargestTensorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode whose `elements` is the number of elements of the largest tensor that any operator returned.

    The size of a tensor's storage counts, not that of the view.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result
