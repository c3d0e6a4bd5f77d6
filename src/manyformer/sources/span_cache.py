"""Self-attention whose cache holds no more than attention can see at the time."""

from functools import lru_cache
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, State
from manyformer.masks import Window
from manyformer.sources.kv_source import KeysValues, KVShape, KVSource, ProjectKV
from manyformer.sources.self_attention import SelfSource
from manyformer.sources.window_cache import RingCache, WindowSource


@runtime_checkable
class SpanReach(Protocol):
    """What knows how far attention looks back."""

    def max_reach(self) -> int:
        """How many keys before it any query may see, as things stand."""


@final
class SpanCacheSource(KVSource):
    """The stream's own tokens as far back as `sight` says when a state begins.

    If it grows while a state is in use, queries see what is kept and no more. A state that has seen nothing yet adds
    nothing to the keys of its first tokens.
    """

    def __init__(self, sight: SpanReach) -> None:
        super().__init__()
        self.sight, self.own = sight, SelfSource()

    def init_state(
        self, batch: int, shape: KVShape, *, folds: bool, capacity: int | None, device: torch.device, dtype: torch.dtype
    ) -> State:
        ring = _ring(self.sight.max_reach() + 1)
        return ring.init_state(batch, shape, folds=folds, capacity=capacity, device=device, dtype=dtype)

    def forward(
        self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State, *, folds: bool
    ) -> KeysValues:
        if not isinstance(state, RingCache):
            return self.own(x, ctx, project, state, folds=folds)  # type: ignore[no-any-return]
        keys: KeysValues = _ring(state.k.shape[2])(x, ctx, project, state, folds=folds)
        if state.length == 0 and x.shape[1] > 1:
            slots = state.k.shape[2]
            return KeysValues(keys.k[:, :, slots:], keys.v[:, :, slots:], ctx.positions, keys.state)
        return keys


@lru_cache(maxsize=64)
def _ring(slots: int) -> WindowSource:
    """It holds nothing but its size."""
    return WindowSource(Window(slots))
