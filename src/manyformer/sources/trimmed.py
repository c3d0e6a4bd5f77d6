"""Self-attention whose cache holds no more than attention can see at the time."""

from functools import lru_cache
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, State
from manyformer.masks import Window
from manyformer.sources.base import Keys, Project, Shape, Source
from manyformer.sources.own import Own
from manyformer.sources.ring import Recent, Ring


@runtime_checkable
class Sight(Protocol):
    """What knows how far attention looks back."""

    def farthest(self) -> int:
        """How many keys before it any query may see, as things stand."""


@final
class Trimmed(Source):
    """The stream's own tokens as far back as `sight` says when a state begins.

    If it grows while a state is in use, queries see what is kept and no more. A state that has seen nothing yet adds
    nothing to the keys of its first tokens.
    """

    def __init__(self, sight: Sight) -> None:
        super().__init__()
        self.sight, self.own = sight, Own()

    def start(
        self, batch: int, shape: Shape, *, folds: bool, capacity: int | None, device: torch.device, dtype: torch.dtype
    ) -> State:
        ring = _ring(self.sight.farthest() + 1)
        return ring.start(batch, shape, folds=folds, capacity=capacity, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: Project, state: State, *, folds: bool) -> Keys:
        if not isinstance(state, Ring):
            return self.own(x, ctx, project, state, folds=folds)  # type: ignore[no-any-return]
        keys: Keys = _ring(state.k.shape[2])(x, ctx, project, state, folds=folds)
        if state.length == 0 and x.shape[1] > 1:
            slots = state.k.shape[2]
            return Keys(keys.k[:, :, slots:], keys.v[:, :, slots:], ctx.place, keys.state)
        return keys


@lru_cache(maxsize=64)
def _ring(slots: int) -> Recent:
    """It holds nothing but its size."""
    return Recent(Window(slots))
