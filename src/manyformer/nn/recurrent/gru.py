"""Gated recurrent units as layers: a bidirectional encoder, and decoders that attend to it or read its last state.

Bahdanau et al. 2015 attend; without attention the encoder ends in one vector, which the decoder reads at every step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.nn.core import (
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
from manyformer.nn.kernels.pairwise_kernel import AdditiveScore
from manyformer.nn.masks import AllKeys
from manyformer.nn.recurrent.gru_scan import (
    ScanResult,
    StateResets,
    StepAttention,
    StepMaps,
    StepSource,
    gru_scan,
    gru_scan_by_maps,
)
from manyformer.nn.runtime.dropout import Dropout
from manyformer.nn.runtime.torch_internals import autocast_disabled, is_plain, refuse_any_size, weight_dtype
from manyformer.nn.runtime.training_hooks import FusedRows


@final
class GRUWeights(nn.Module, FusedRows):
    """The weights of a gated recurrent unit (Cho et al. 2014; Bahdanau et al. 2015, appendix A.1.1).

    `input_proj` maps a token to update gate, reset gate and candidate; `gates` and `candidate` act on the hidden state.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.input_proj = nn.Linear(width, 3 * dim)
        self.gates = nn.Linear(dim, 2 * dim, bias=False)
        self.candidate = nn.Linear(dim, dim, bias=False)

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"input_proj.weight": (self.dim,) * 3, "gates.weight": (self.dim,) * 2}


def scan_units(
    units: Sequence[GRUWeights],
    inputs: Float[Tensor, "g l b i"],
    initial_states: Float[Tensor, "g b n"],
    resets: StateResets | None,
    source: StepSource | None = None,
    score: AdditiveScore | None = None,
) -> ScanResult:
    """The states of each unit before and after every step; one unit may attend to a source by additive scores.

    Raises UserError in an exported graph of any length, which has no loop over tokens."""
    refuse_any_size(inputs.shape[1], "a gated recurrent unit is a loop over tokens")
    linears: list[nn.Module] = [linear for unit in units for linear in (unit.gates, unit.candidate)]
    if score is not None:
        linears += [score.query, score.energy]
    with autocast_disabled(inputs.device):
        if not all(is_plain(linear, nn.Linear) for linear in linears):
            return _scan_by_modules(units, inputs, initial_states, resets, source, score)
        gates = _stacked([unit.gates.weight.mT for unit in units])
        candidate = _stacked([unit.candidate.weight.mT for unit in units])
        attention = None
        if source is not None and score is not None:
            keys, values, visible = source
            attention = StepAttention(score.query.weight.mT, keys, values, score.energy.weight[0], visible)
        return gru_scan(inputs, gates, candidate, initial_states, attention, resets)


def _scan_by_modules(
    units: Sequence[GRUWeights],
    inputs: Tensor,
    initial_states: Tensor,
    resets: StateResets | None,
    source: StepSource | None,
    score: AdditiveScore | None,
) -> ScanResult:
    """The scan with a call of each linear layer at every step, where one of them is more than its matrix."""
    compute_dtype = torch.promote_types(inputs.dtype, torch.float32)

    def call(linear: nn.Linear, x: Tensor) -> Tensor:
        y: Tensor = linear(x.to(weight_dtype(linear)))
        return y.to(compute_dtype)

    def gates(x: Tensor, states: Tensor) -> Tensor:
        return x + torch.stack([call(unit.gates, state) for unit, state in zip(units, states)])

    def candidates(x: Tensor, states: Tensor) -> Tensor:
        return x + torch.stack([call(unit.candidate, state) for unit, state in zip(units, states)])

    maps = StepMaps(gates, candidates)
    if source is not None and score is not None:
        source = StepSource(source.keys.to(compute_dtype), source.values.to(compute_dtype), source.visible)
        maps = StepMaps(
            gates, candidates, partial(call, score.query), lambda pairs: call(score.energy, pairs).squeeze(-1)
        )
    if resets is not None and resets.starts is not None:
        resets = resets._replace(starts=resets.starts.to(compute_dtype))
    return gru_scan_by_maps(inputs.to(compute_dtype), maps, initial_states.to(compute_dtype), source, resets)


def _stacked(matrices: list[Tensor]) -> Float[Tensor, "g n m"]:
    """The matrices of all units as one tensor; a view of the only one."""
    if len(matrices) == 1:
        return matrices[0][None]
    return torch.stack(matrices)


@final
class BidirectionalGRU(Layer):
    """A forward and a backward GRU over each document: y = [forward; backward], 2 dim wide (section 3.2).

    Both run in one scan, because a reversed document occupies the same columns.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.forward_gru = GRUWeights(width, dim)
        self.backward_gru = GRUWeights(width, dim)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state is not None:
            raise ValueError("BidirectionalGRU cannot continue from a state: later tokens change all earlier outputs")
        reversed_columns = mirrored_columns(ctx.positions)
        # two directions as one batch of two: the scan takes its steps once for both
        streams = ((self.forward_gru, x), (self.backward_gru, gather_columns(x, reversed_columns)))
        inputs = torch.stack([project_inputs(gru, stream) for gru, stream in streams])
        initial_states = inputs.new_zeros(2, x.shape[0], self.dim)
        units = (self.forward_gru, self.backward_gru)
        result = scan_units(units, inputs, initial_states, state_resets(ctx.positions))
        forward_states, backward_states = result.states_out.transpose(1, 2)
        y = torch.cat([forward_states, gather_columns(backward_states, reversed_columns)], dim=-1)
        return LayerOutput(y.to(x))


class AttendingGRUState(NamedTuple):
    """The hidden state after the last token, and the projected keys and values; None before the first call."""

    hidden: Float[Tensor, "b n"]
    keys: Float[Tensor, "b s a"] | None = None
    values: Float[Tensor, "b s i"] | None = None


@final
class AttendingGRU(Layer, FusedRows):
    """A GRU decoder that attends to the encoder's output by additive attention at every step.

    Sections 3.1 and A.2.2: the query is the hidden state before the step, and that state, the token and the context
    vector give the output by a maxout layer of width `out_dim`. The initial state of a document is tanh(W_s h), with h
    the encoder's backward state at the first token of its source. Keys, and the gate inputs of values, are projected
    once per source; context vectors and outputs are computed for all tokens at once, after the recurrence.
    """

    key_origin = "source"

    def __init__(self, width: int, dim: int, memory_dim: int, *, align_dim: int, out_dim: int, dropout: float) -> None:
        super().__init__()
        self.dim = dim
        self.backward_dim = memory_dim // 2
        self.gru = GRUWeights(width, dim)
        self.context_proj = nn.Linear(memory_dim, 3 * dim, bias=False)
        self.score = AdditiveScore(dim, align_dim, key_dim=memory_dim)
        self.initial_proj = nn.Linear(self.backward_dim, dim)
        self.readout = nn.Linear(dim + width + memory_dim, 2 * out_dim)
        self.dropout = Dropout(dropout)
        self.mask = AllKeys()

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        wide_dtype = torch.promote_types(dtype, torch.float32)
        return AttendingGRUState(torch.zeros(batch, self.dim, device=device, dtype=wide_dtype))

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"context_proj.weight": (self.dim,) * 3}

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if ctx.memory is None:
            raise ValueError("AttendingGRU attends to a source sequence, but the context has no memory")
        # the source does not change between calls, so that its projections are part of the state
        memory, memory_positions = ctx.memory
        keys, values = (None, None) if state is None else state[1:]
        if keys is None or values is None:
            keys = self.score.key(memory)
            values = self.context_proj(memory)
        source = StepSource(keys, values, self._dense_mask(ctx.positions, memory_positions))
        hidden = None if state is None else state.hidden
        document_states = partial(self._document_states, memory=ctx.memory)
        initial_state, resets = initial_states(ctx.positions, document_states, hidden)
        inputs = project_inputs(self.gru, x)[None]
        result = scan_units((self.gru,), inputs, initial_state[None], resets, source, self.score)
        assert result.weights is not None
        weights = result.weights.transpose(0, 1)
        ctx.watch(self, "weights", weights[:, None])
        # once for all tokens: the recurrence itself needs only the projected values
        context_vectors = (weights.to(memory) @ memory).to(x)
        # the state before each token, as in the paper, not the one that the token leads to
        features = torch.cat([result.states_in[0].transpose(0, 1).to(x), x, context_vectors], dim=-1)
        # maxout pairs are channels i and i + out_dim, which is faster than adjacent channels
        y: Tensor = self.dropout(torch.maximum(*self.readout(features).chunk(2, dim=-1)))
        return LayerOutput(y, None if state is None else AttendingGRUState(result.states_out[0, -1], keys, values))

    def _dense_mask(
        self, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> Bool[Tensor, "l b s"] | None:
        if isinstance(query_positions.layout, ContiguousLayout) and isinstance(key_positions.layout, ContiguousLayout):
            return None
        return self.mask.dense(query_positions, key_positions, 1)[:, 0].transpose(0, 1)

    def _document_states(self, query_positions: TokenPositions, memory: MemorySequence) -> Float[Tensor, "b l n"]:
        """The initial state of each token's document, which depends on the source alone."""
        same_document = memory.positions.segment_ids[:, None] == query_positions.segment_ids[:, :, None]
        # the first token of the document in the source
        source_starts = same_document.byte().argmax(-1)
        backward_states = gather_columns(memory.y[..., self.backward_dim :], source_starts)
        # a document without a source begins from the bias alone
        backward_states = backward_states * same_document.any(-1, keepdim=True)
        states: Tensor = self.initial_proj(backward_states).tanh()
        return states


def initial_states(
    positions: TokenPositions,
    document_states: Callable[[TokenPositions], Float[Tensor, "b l n"]],
    hidden: Float[Tensor, "b n"] | None,
) -> tuple[Float[Tensor, "b n"], StateResets | None]:
    """The initial state of a decoder, and the resets to `document_states` at later starts of documents.

    `hidden` is the state after the tokens before, None for a call without a state.
    """
    layout = positions.layout
    if hidden is not None and isinstance(layout, ContiguousLayout) and layout.start > 0:
        return hidden, None
    resets = state_resets(positions, continues=hidden is not None)
    if resets is None:
        return document_states(positions.columns(0, 1))[:, 0], None
    starts = document_states(positions)
    if hidden is None:
        # never read: every row begins with a document or with padding, and so with a reset
        initial_state = torch.zeros_like(starts[:, 0])
    else:
        initial_state = hidden.to(starts)
    return initial_state, resets._replace(starts=starts.transpose(0, 1)[None])


def mirrored_columns(positions: TokenPositions) -> Int[Tensor, "b l"]:
    """The column of each token's mirror image in its document, which reverses every document.

    Padding, also within a document, maps to itself.
    """
    position_ids = positions.position_ids
    columns = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    if isinstance(positions.layout, ContiguousLayout):
        # every row is one document
        return columns.flip(1)
    valid = positions.segment_ids != PADDING_SEGMENT
    ranks = valid.cumsum(1) - 1
    valid_count = ranks[:, -1:] + 1
    document_starts = torch.where(valid & (positions.position_ids == 0), ranks, valid_count)
    # the rank of the first token of the next document
    next_starts = torch.cat([document_starts[:, 1:], valid_count], dim=1).flip(1).cummin(1).values.flip(1)
    # the column of the token of each rank
    order = torch.argsort((~valid).byte(), dim=1, stable=True)
    return torch.where(valid, order.gather(1, (next_starts - 1 - positions.position_ids).clamp(min=0)), columns)


def state_resets(positions: TokenPositions, *, continues: bool = False) -> StateResets | None:
    """The document starts, and the padding unless it is at the end of rows whose state is not continued."""
    layout = positions.layout
    if isinstance(layout, ContiguousLayout) or (
        isinstance(layout, PackedLayout) and layout.right_padded and not continues
    ):
        return None
    valid = positions.segment_ids != PADDING_SEGMENT
    document_starts = valid & (positions.position_ids == 0)
    # what padding makes of the state is never read: a document that follows begins with a reset
    unpadded = isinstance(layout, PackedLayout) and not continues
    return StateResets(document_starts.mT, None if unpadded else valid.mT)


def project_inputs(gru: GRUWeights, x: Float[Tensor, "b l d"]) -> Float[Tensor, "l b i"]:
    """The gate and candidate inputs of each token, time-major."""
    projected: Tensor = gru.input_proj(x.transpose(0, 1))
    return projected


def gather_columns(x: Float[Tensor, "b s d"], columns: Int[Tensor, "b l"]) -> Float[Tensor, "b l d"]:
    """Gather `columns` of each row."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, (rows + columns).flatten()).view(*columns.shape, -1)


@final
class ForwardGRU(Layer):
    """A GRU over each document, from its first token to its last (Cho et al. 2014, arXiv:1406.1078, section 2.2)."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.gru = GRUWeights(width, dim)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state is not None:
            raise ValueError("ForwardGRU encodes whole documents, so it continues from no state")
        inputs = project_inputs(self.gru, x)[None]
        initial_state = inputs.new_zeros(1, x.shape[0], self.dim)
        result = scan_units((self.gru,), inputs, initial_state, state_resets(ctx.positions))
        return LayerOutput(result.states_out[0].transpose(0, 1).to(x))


class FixedVectorState(NamedTuple):
    """The hidden state after the last token."""

    hidden: Float[Tensor, "b n"]


@final
class FixedVectorGRU(Layer, FusedRows):
    """A GRU decoder that reads one vector c of the source at every step: the encoder's output at its last token.

    Cho et al. 2014, section 2.2, in the form of Bahdanau et al. 2015 (arXiv:1409.0473), whose decoder it is if every
    context vector is c. The initial state of a document is tanh(W_s c).
    """

    def __init__(self, width: int, dim: int, memory_dim: int, *, out_dim: int, dropout: float) -> None:
        super().__init__()
        self.dim = dim
        self.gru = GRUWeights(width, dim)
        self.context_proj = nn.Linear(memory_dim, 3 * dim, bias=False)
        self.initial_proj = nn.Linear(memory_dim, dim)
        self.readout = nn.Linear(dim + width + memory_dim, 2 * out_dim)
        self.dropout = Dropout(dropout)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        wide_dtype = torch.promote_types(dtype, torch.float32)
        return FixedVectorState(torch.zeros(batch, self.dim, device=device, dtype=wide_dtype))

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"context_proj.weight": (self.dim,) * 3}

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        memory = ctx.memory
        if memory is None:
            raise ValueError("FixedVectorGRU reads a source sequence, but the context has no memory")

        def document_states(positions: TokenPositions) -> Tensor:
            states: Tensor = self.initial_proj(source_vectors(positions, memory)).tanh()
            return states

        vectors = source_vectors(ctx.positions, memory)
        # the vector of the source is the same at every step, so that its part of the inputs is added before the scan
        inputs = (project_inputs(self.gru, x) + self.context_proj(vectors).transpose(0, 1))[None]
        initial_state, resets = initial_states(ctx.positions, document_states, None if state is None else state.hidden)
        result = scan_units((self.gru,), inputs, initial_state[None], resets)
        features = torch.cat([result.states_in[0].transpose(0, 1).to(x), x, vectors.to(x)], dim=-1)
        y: Tensor = self.dropout(torch.maximum(*self.readout(features).chunk(2, dim=-1)))
        return LayerOutput(y, None if state is None else FixedVectorState(result.states_out[0, -1]))


def source_vectors(positions: TokenPositions, memory: MemorySequence) -> Float[Tensor, "b l m"]:
    """The encoder's output at the last token of each target token's source; zeros where there is none."""
    same_document = memory.positions.segment_ids[:, None] == positions.segment_ids[:, :, None]
    # the first maximum from the end is the last token of the source
    from_end = same_document.byte().flip(-1).argmax(-1)
    return gather_columns(memory.y, memory.y.shape[1] - 1 - from_end) * same_document.any(-1, keepdim=True)
