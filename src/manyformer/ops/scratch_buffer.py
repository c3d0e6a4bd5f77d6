"""Memory for what is needed for a moment."""

import torch
from torch import Tensor


class ScratchBuffer:
    """Memory that is written again and again: fresh memory costs most."""

    def __init__(self, like: Tensor) -> None:
        self._like = like.new_empty(0)
        self._known: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """What stands there means nothing; it holds until the same name is asked for again."""
        count = torch.Size(shape).numel()
        if name not in self._known or len(self._known[name]) < count:
            self._known[name] = self._like.new_empty(count)
        return self._known[name][:count].view(shape)

    def clear(self) -> None:
        """Give it all back: what lives on between a forward and a backward pass should hold none."""
        self._known.clear()
