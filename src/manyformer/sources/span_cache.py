"""Self-attention whose cache holds only the current maximum span of attention."""

from functools import lru_cache
from typing import Protocol, final, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, State
from manyformer.masks import Window
from manyformer.sources.kv_source import CacheSpec, KeysValues, KVSource, ProjectKV
from manyformer.sources.self_attention import SelfSource
from manyformer.sources.static_cache import StaticRing
from manyformer.sources.window_cache import RingCache, WindowSource


@runtime_checkable
class SpanReach(Protocol):
    """An object that knows the current maximum reach of attention."""

    def max_reach(self) -> int:
        """The largest number of preceding keys that any query can see with the current parameters."""


@final
class SpanCacheSource(KVSource):
    """The layer's own input and the cached tokens within the reach that `span_reach` has when the state is created.

    If the reach grows while a state is in use, queries see only the cached keys. An empty state adds no columns to the
    keys of the first tokens.
    """

    def __init__(self, span_reach: SpanReach) -> None:
        super().__init__()
        self.span_reach = span_reach
        self.self_source = SelfSource()

    def init_state(self, spec: CacheSpec) -> State:
        return _window_source(self.span_reach.max_reach() + 1).init_state(spec)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        if not isinstance(state, RingCache | StaticRing):
            return self.self_source(x, ctx, project, state)
        keys = _window_source(state.k.shape[2])(x, ctx, project, state)
        if isinstance(state, RingCache) and state.length == 0 and x.shape[1] > 1:
            slots = state.k.shape[2]
            return KeysValues(keys.k[:, :, slots:], keys.v[:, :, slots:], ctx.positions, keys.state)
        return keys


@lru_cache(maxsize=64)
def _window_source(slots: int) -> WindowSource:
    """A window source, cached because it has no parameters or state of its own."""
    return WindowSource(Window(slots))
