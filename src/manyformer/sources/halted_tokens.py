"""Self-attention of some tokens of a stream, whose other tokens stand still: those have their keys already."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import Context, State, TokenPositions
from manyformer.sources.kv_source import KeysValues, KVShape, KVSource, ProjectKV
from manyformer.sources.self_attention import SelfSource


class HaltedKV(NamedTuple):
    """Keys and values of the tokens that stand still, in their columns, and where the tokens at hand belong.

    Of the latter, number `spot[i]` (all rows end to end) has its place at `token[i]` of the stream, likewise end to
    end; `rows` are the rows of the stream that have any. `kept` is what is remembered of earlier calls.
    """

    kept: State
    k: Float[Tensor, "b g l e"]
    v: Float[Tensor, "b g l f"]
    positions: TokenPositions
    token: Int[Tensor, " n"]
    spot: Int[Tensor, " n"]
    rows: Int[Tensor, " r"]


@final
class HaltedTokenSource(KVSource):
    """The stream's own tokens as for `SelfSource`; with a `HaltedKV` as state, the tokens at hand are some of the
    stream's.

    Then keys are those of all its tokens, so that whatever is remembered does not tell who stood still.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own = SelfSource()

    def init_state(
        self, batch: int, shape: KVShape, *, folds: bool, capacity: int | None, device: torch.device, dtype: torch.dtype
    ) -> State:
        return self.own.init_state(batch, shape, folds=folds, capacity=capacity, device=device, dtype=dtype)

    def forward(
        self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State, *, folds: bool
    ) -> KeysValues:
        if not isinstance(state, HaltedKV):
            return self.own(x, ctx, project, state, folds=folds)  # type: ignore[no-any-return]
        k, v = (_put(kept, new, state) for kept, new in zip((state.k, state.v), project(x, ctx.positions)))
        keys = self.remember(x, Context(state.positions), k, v, state.kept)
        if len(state.rows) == k.shape[0]:
            return keys
        rows, place = state.rows, keys.positions
        pos, seg = (field.expand(k.shape[0], -1)[rows] for field in (place.position_ids, place.segment_ids))
        return KeysValues(keys.k[rows], keys.v[rows], TokenPositions(pos, seg), keys.state)

    def remember(self, x: Tensor, ctx: Context, k: Tensor, v: Tensor, kept: State) -> KeysValues:
        """Keys and values of all tokens of the stream, with those that are remembered."""
        keys: KeysValues = self.own(x, ctx, lambda *_: (k, v), kept, folds=False)
        return keys


def _put(kept: Tensor, new: Tensor, where: HaltedKV) -> Tensor:
    """`kept` (b, g, l, e) with what is new of some of its tokens."""
    flat = kept.transpose(1, 2).flatten(0, 1)
    tokens = new.transpose(1, 2).flatten(0, 1)[where.spot]
    whole = flat.index_copy(0, where.token, tokens.to(flat.dtype))
    return whole.view(kept.shape[0], kept.shape[2], *whole.shape[1:]).transpose(1, 2)
