"""The memory of a computation without computing it: storages of tensors are followed from creation to release."""

import weakref
from collections.abc import Iterable
from typing import Any, final

from torch import Tensor

from manyformer.torch_internals import TorchDispatchMode, tree_leaves


@final
class LiveMemoryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode whose `live` is the number of bytes of all storages created in it that still exist.

    `peak` is its maximum so far, and `live_logits` the bytes of those whose last axis has `classes` elements. Storages
    of `known` tensors, such as parameters, are not counted. It follows any device, `meta` included, where tensors have
    sizes and no memory.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, classes: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.live_logits = 0
        self._classes = classes
        self._sizes: dict[int, int] = {}
        # the objects are kept, so that their numbers are not given to new storages
        self._known = [tensor.untyped_storage() for tensor in known]
        self._known_ids = {storage._cdata for storage in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._known_ids or number in self._sizes:
            return
        is_logits = tensor.ndim > 1 and tensor.shape[-1] == self._classes and tensor.is_floating_point()
        self._sizes[number] = storage.nbytes()
        self.live += storage.nbytes()
        self.live_logits += storage.nbytes() * is_logits
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, number, is_logits=is_logits)

    def _release(self, number: int, *, is_logits: bool) -> None:
        size = self._sizes.pop(number, 0)
        self.live -= size
        self.live_logits -= size * is_logits
