"""Recurrent layers: one that reads both ways, and one that looks at what was read (Bahdanau et al. 2015)."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.autocast import autocast_disabled
from manyformer.core import (
    PADDING_SEGMENT,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    MemorySequence,
    PackedLayout,
    State,
    TokenPositions,
)
from manyformer.dropout import Dropout
from manyformer.kernels.pair_scores import AdditiveScore
from manyformer.masks import AllKeys
from manyformer.ops.gru_scan import StateResets, StepAttention, scan


@final
class GRUWeights(nn.Module):
    """The weights of a gated recurrent unit (Cho et al. 2014; Bahdanau et al. 2015, appendix A.1.1).

    `into` is what a token says to update gate, reset gate and candidate; `gates` and `candidate` are for the state.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 3 * dim)
        self.gates, self.candidate = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, dim, bias=False)


@final
class BidirectionalGRU(Layer):
    """One unit reads each document forwards, another one backwards: y = [ahead; back], 2 dim wide (section 3.2).

    Both go through all rows at the same time, since a document that is read backwards begins where it did.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.dim, self.ahead, self.back = dim, GRUWeights(width, dim), GRUWeights(width, dim)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state is not None:
            raise ValueError("a bidirectional layer cannot go on from a state: later tokens change all earlier outputs")
        turned = mirrored(ctx.positions)
        both = torch.stack([_in_time(self.ahead, x), _in_time(self.back, _taken(x, turned))])
        gates, candidate = (
            torch.stack([getattr(unit, name).weight.mT for unit in (self.ahead, self.back)])
            for name in ("gates", "candidate")
        )
        start = both.new_zeros(2, x.shape[0], self.dim)
        with autocast_disabled(x.device):
            ahead, back = scan(both, gates, candidate, start, None, _breaks(ctx.positions)).states_out.transpose(1, 2)
        return LayerOutput(torch.cat([ahead, _taken(back, turned)], dim=-1).to(x))


class AttendingGRUState(NamedTuple):
    """The state after the last token, and what it looks at; None until the first call has made the latter."""

    hidden: Float[Tensor, "b n"]
    keys: Float[Tensor, "b s a"] | None = None
    values: Float[Tensor, "b s i"] | None = None


@final
class AttendingGRU(Layer):
    """A recurrent decoder that, before every step, looks at the encoder's output by additive attention.

    Sections 3.1 and A.2.2: the query is the state before the step, and that state, the token and what was looked at
    give the output by a layer of maxout, `out` wide. A document begins with tanh(W_s h), h being what `back` left at
    the beginning of its source. Keys and what values say to the gates are projected once for each source; contexts
    and outputs are formed for all tokens at once, after the recurrence.
    """

    def __init__(self, width: int, dim: int, memory: int, *, align: int, out: int, dropout: float) -> None:
        super().__init__()
        self.dim, self.side = dim, memory // 2
        self.unit, self.context = GRUWeights(width, dim), nn.Linear(memory, 3 * dim, bias=False)
        self.score = AdditiveScore(dim, align, of=memory)
        self.first = nn.Linear(self.side, dim)
        self.readout, self.dropout = nn.Linear(dim + width + memory, 2 * out), Dropout(dropout)
        self.mask = AllKeys()

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return AttendingGRUState(
            torch.zeros(batch, self.dim, device=device, dtype=torch.promote_types(dtype, torch.float32))
        )

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if ctx.memory is None:
            raise ValueError("a decoder that looks at a source needs a memory, but the call brings none")
        memory, place = ctx.memory
        keys, values = (None, None) if state is None else state[1:]
        if keys is None or values is None:
            keys, values = self.score.key(memory), self.context(memory)
        look = StepAttention(
            self.score.query.weight.mT, keys, values, self.score.energy.weight[0], self._seen(ctx.positions, place)
        )
        start, breaks = self._begin(ctx.positions, ctx.memory, state)
        gates, candidate = self.unit.gates.weight.mT[None], self.unit.candidate.weight.mT[None]
        into = _in_time(self.unit, x)[None]
        with autocast_disabled(x.device):
            found = scan(into, gates, candidate, start[None], look, breaks)
        assert found.weights is not None
        weights = found.weights.transpose(0, 1)
        ctx.watch(self, "weights", weights[:, None])
        told = torch.cat([found.states_in[0].transpose(0, 1).to(x), x, (weights.to(memory) @ memory).to(x)], dim=-1)
        # the pairs of which the larger counts lie half the width apart, which is quicker than side by side
        y: Tensor = self.dropout(torch.maximum(*self.readout(told).chunk(2, dim=-1)))
        return LayerOutput(y, None if state is None else AttendingGRUState(found.states_out[0, -1], keys, values))

    def _seen(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Bool[Tensor, "l b s"] | None:
        if isinstance(query_positions.layout, ContiguousLayout) and isinstance(key_positions.layout, ContiguousLayout):
            return None
        return self.mask.dense(query_positions, key_positions, 1)[:, 0].transpose(0, 1)

    def _begin(
        self, query_positions: TokenPositions, memory: MemorySequence, state: AttendingGRUState | None
    ) -> tuple[Tensor, StateResets | None]:
        """The state to begin with, and where documents begin later on."""
        if (
            isinstance(query_positions.layout, ContiguousLayout)
            and query_positions.layout.start > 0
            and state is not None
        ):
            return state.hidden, None
        breaks = _breaks(query_positions, kept=state is not None)
        if breaks is None:
            return self._firsts(query_positions.columns(0, 1), memory)[:, 0], None
        firsts = self._firsts(query_positions, memory)
        start = torch.zeros_like(firsts[:, 0]) if state is None else state.hidden.to(firsts)
        return start, breaks._replace(starts=firsts.transpose(0, 1)[None])

    def _firsts(self, query_positions: TokenPositions, memory: MemorySequence) -> Float[Tensor, "b l n"]:
        """For each place the state that its document begins with; it depends on the source alone."""
        same = memory.positions.segment_ids[:, None] == query_positions.segment_ids[:, :, None]
        begins = same.byte().argmax(-1)
        back = _taken(memory.y[..., self.side :], begins) * same.any(-1, keepdim=True)
        found: Tensor = self.first(back).tanh()
        return found


def mirrored(positions: TokenPositions) -> Int[Tensor, "b l"]:
    """For each token the column of the one that is as far from the end of their document as it is from the beginning.

    Padding, also within a document, stays where it is.
    """
    columns = torch.arange(positions.position_ids.shape[1], device=positions.position_ids.device).expand_as(
        positions.position_ids
    )
    if isinstance(positions.layout, ContiguousLayout):
        return columns.flip(1)
    real = positions.segment_ids != PADDING_SEGMENT
    rank = real.cumsum(1) - 1
    total = rank[:, -1:] + 1
    begins = torch.where(real & (positions.position_ids == 0), rank, total)
    # the rank at which the next document begins
    later = torch.cat([begins[:, 1:], total], dim=1).flip(1).cummin(1).values.flip(1)
    order = torch.argsort((~real).byte(), dim=1, stable=True)
    return torch.where(real, order.gather(1, (later - 1 - positions.position_ids).clamp(min=0)), columns)


def _breaks(positions: TokenPositions, *, kept: bool = False) -> StateResets | None:
    """Where documents begin, and what is padding where that matters: before a token, or where the state is `kept`."""
    layout = positions.layout
    if isinstance(layout, ContiguousLayout) or (isinstance(layout, PackedLayout) and layout.right_padded and not kept):
        return None
    real = positions.segment_ids != PADDING_SEGMENT
    begins = real & (positions.position_ids == 0)
    whole = isinstance(layout, PackedLayout) and not kept
    return StateResets(begins.mT, None if whole else real.mT)


def _in_time(unit: GRUWeights, x: Float[Tensor, "b l d"]) -> Float[Tensor, "l b i"]:
    """What each token says to the unit, time before the batch."""
    found: Tensor = unit.into(x.transpose(0, 1))
    return found


def _taken(x: Float[Tensor, "b s d"], columns: Int[Tensor, "b l"]) -> Float[Tensor, "b l d"]:
    """The columns of each row, in that order."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, (rows + columns).flatten()).view(*columns.shape, -1)
