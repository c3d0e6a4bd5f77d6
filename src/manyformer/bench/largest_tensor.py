"""How large the largest tensor is that a computation makes."""

from typing import Any, final

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@final
class LargestTensorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, `elements` becomes the number of elements of the largest tensor that any operator makes.

    What a tensor occupies counts, not its view.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return found
