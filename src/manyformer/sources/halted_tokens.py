"""Self-attention of the active tokens of a sequence, whose halted tokens have cached keys and values."""

from typing import NamedTuple, final

from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import Context, State, TokenPositions
from manyformer.sources.kv_source import CacheSpec, KeysValues, KVSource, ProjectKV
from manyformer.sources.self_attention import SelfSource


class HaltedKV(NamedTuple):
    """Keys and values of halted tokens, in their columns, and the places of the active tokens of this call.

    With rows flattened, active token `packed_index[i]` of the call is token `token_index[i]` of the sequence;
    `row_index` are the rows of the sequence that have active tokens. `state` is the cache of earlier calls.
    """

    state: State
    k: Float[Tensor, "b g l e"]
    v: Float[Tensor, "b g l f"]
    positions: TokenPositions
    token_index: Int[Tensor, " n"]
    packed_index: Int[Tensor, " n"]
    row_index: Int[Tensor, " r"]


@final
class HaltedTokenSource(KVSource):
    """`SelfSource` that also accepts a `HaltedKV` state, for calls with the active tokens of a sequence alone.

    The keys then are those of all tokens of the sequence, so that the cache does not depend on which tokens halted.
    """

    needs_heads = True

    def __init__(self) -> None:
        super().__init__()
        self.self_source = SelfSource()

    def init_state(self, spec: CacheSpec) -> State:
        return self.self_source.init_state(spec)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        if not isinstance(state, HaltedKV):
            return self.self_source(x, ctx, project, state)
        new_k, new_v = project(x, ctx.positions)
        k = _insert_active(state.k, new_k, state)
        v = _insert_active(state.v, new_v, state)
        keys = self.update_cache(x, Context(state.positions), k, v, state.state)
        if len(state.row_index) == k.shape[0]:
            return keys
        rows = state.row_index
        position_ids, segment_ids = (ids.expand(k.shape[0], -1)[rows] for ids in keys.positions[:2])
        return KeysValues(keys.k[rows], keys.v[rows], TokenPositions(position_ids, segment_ids), keys.state)

    def update_cache(self, x: Tensor, ctx: Context, k: Tensor, v: Tensor, state: State) -> KeysValues:
        """Return keys and values of the cached tokens and of all tokens of the sequence, and the new cache."""
        return self.self_source(x, ctx, lambda *_: (k, v), state)


def _insert_active(halted: Tensor, new: Tensor, state: HaltedKV) -> Tensor:
    """Insert the new keys or values of active tokens into those of all tokens, `halted` (b, g, l, e)."""
    flat = halted.transpose(1, 2).flatten(0, 1)
    active = new.transpose(1, 2).flatten(0, 1)[state.packed_index]
    merged = flat.index_copy(0, state.token_index, active.to(flat.dtype))
    return merged.view(halted.shape[0], halted.shape[2], *merged.shape[1:]).transpose(1, 2)
