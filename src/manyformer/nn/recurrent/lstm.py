"""Long short-term memory as a layer, whose state begins anew in every document."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from manyformer.nn.core import (
    PADDING_SEGMENT,
    AlignedLayout,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    PackedLayout,
    State,
    StepLayout,
    TokenPositions,
)
from manyformer.nn.runtime.device_reads import is_readable
from manyformer.nn.runtime.devices import compiles_attention, send
from manyformer.nn.runtime.handwritten_gradient import needs_plain_operations
from manyformer.nn.runtime.torch_internals import autocast_disabled, compiler_disabled, is_plain, refuse_any_size
from manyformer.nn.runtime.training_hooks import FusedRows, OptimizerHints

FORGET_BIAS = 1.0
"""The initial bias of the forget gate (Gers et al. 2000; Jozefowicz et al. 2015)."""


class LSTMState(NamedTuple):
    """The output and the cell after the last token of each row."""

    hidden: Float[Tensor, "b d"]
    cell: Float[Tensor, "b d"]


class DocumentRuns(NamedTuple):
    """The tokens of each row, without padding, as runs of one document each, the runs of a row in order.

    Token i of all runs is at `rows[i]`, `columns[i]`, the token of number `rank[i]` in run `run[i]`. Run j begins with
    token `starts[j]`; `last` are the last runs of the rows that have any. `lengths`, those of the runs, are on the
    host, which torch's LSTM asks for them."""

    rows: Int[Tensor, " n"]
    columns: Int[Tensor, " n"]
    run: Int[Tensor, " n"]
    rank: Int[Tensor, " n"]
    starts: Int[Tensor, " runs"]
    last: Int[Tensor, " m"]
    lengths: Int[Tensor, " runs"]


def find_runs(positions: TokenPositions, batch: int) -> DocumentRuns:
    """The runs of these tokens: one begins at the first token of a row, and at position 0 of a document."""
    if isinstance(positions.layout, PackedLayout):
        return _known_runs(positions.layout, positions.segment_ids.device)
    position_ids, segment_ids = (ids.expand(batch, -1) for ids in positions[:2])
    rows, columns = (segment_ids != PADDING_SEGMENT).nonzero(as_tuple=True)
    is_first = position_ids[rows, columns] == 0
    # the first token of a row may continue a document of the state, and begins a run nevertheless
    is_first[:1] = True
    is_first[1:] |= rows[1:] != rows[:-1]
    run = is_first.cumsum(0) - 1
    starts = is_first.nonzero()[:, 0]
    rank = torch.arange(len(run), device=run.device) - starts[run]
    return DocumentRuns(rows, columns, run, rank, starts, _last_of_rows(rows[starts]), run.bincount().cpu())


def _known_runs(layout: PackedLayout, device: torch.device) -> DocumentRuns:
    """The runs of packed documents, listed on the host, so that no device is waited for."""
    rows, begin, stop = torch.tensor(layout.documents, dtype=torch.long, device="cpu").view(-1, 3).unbind(1)
    lengths = stop - begin
    starts = lengths.cumsum(0) - lengths
    run = torch.arange(len(rows), device="cpu").repeat_interleave(lengths)
    rank = torch.arange(len(run), device="cpu") - starts[run]
    # one copy for the four lists of tokens
    row, column, run, rank = send(torch.stack([rows[run], begin[run] + rank, run, rank]), device).unbind()
    return DocumentRuns(row, column, run, rank, send(starts, device), send(_last_of_rows(rows), device), lengths)


def _last_of_rows(rows: Int[Tensor, " runs"]) -> Int[Tensor, " m"]:
    """The number of the last run of each row, for runs in the order of these rows."""
    is_last = torch.ones_like(rows, dtype=torch.bool)
    is_last[:-1] = rows[1:] != rows[:-1]
    return is_last.nonzero()[:, 0]


@final
class LSTM(Layer, FusedRows, OptimizerHints):
    """Long short-term memory (Hochreiter and Schmidhuber 1997) with a forget gate, as wide as the stream.

    Its state begins as zeros in every document; padding leaves it as it is. Each document of a batch is one sequence of
    a single call of `torch.nn.LSTM`."""

    hidden_matrices = ("cells.weight_ih_l0", "cells.weight_hh_l0")

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.cells = nn.LSTM(dim, dim, batch_first=True)
        for name, weight in self.cells.named_parameters():
            if name.startswith("weight"):
                nn.init.xavier_uniform_(weight)
            else:
                nn.init.zeros_(weight)
        # torch's order of gates is input, forget, cell, output
        nn.init.constant_(self._weights[2][dim : 2 * dim], FORGET_BIAS)

    @property
    def _weights(self) -> Sequence[nn.Parameter]:
        """The matrices of inputs and states, then the biases of both."""
        return self.cells.all_weights[0]

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        gates = (self.dim,) * 4
        return {"cells.weight_ih_l0": gates, "cells.weight_hh_l0": gates}

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return LSTMState(*torch.zeros(2, batch, self.dim, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        weights = self._weights
        layout = ctx.positions.layout
        dtype = weights[0].dtype
        if state is not None and self._is_one_token(ctx.positions):
            y, next_state = _read_token(x.to(dtype), ctx.positions, state, weights)
            return LayerOutput(y.to(x), next_state)
        if state is None:
            earlier = self.init_state(x.shape[0], device=x.device, dtype=dtype)
        else:
            earlier = state
        # on the meta device documents cannot be told apart, and cost the same
        if x.is_meta or isinstance(layout, ContiguousLayout):
            # a document that begins here starts from zeros, whatever the state holds of another one
            begins = isinstance(layout, ContiguousLayout) and layout.start == 0
            with autocast_disabled(x.device):
                y, next_state = self._read_rows(x.to(dtype), earlier, begins=begins)
            return LayerOutput(y.to(x), None if state is None else next_state)
        runs = find_runs(ctx.positions, x.shape[0])
        y = torch.zeros_like(x, dtype=dtype)
        next_state = earlier
        if len(runs.lengths):
            with autocast_disabled(x.device):
                outputs, next_state = self._read_runs(x.to(dtype), runs, ctx.positions, earlier)
            y = y.index_put((runs.rows, runs.columns), outputs)
        return LayerOutput(y.to(x), None if state is None else next_state)

    def _is_one_token(self, positions: TokenPositions) -> bool:
        """Whether every row has one more token, and nobody asks for gradients, which cells alone would not give."""
        layout = positions.layout
        if isinstance(layout, StepLayout):
            return True
        if positions.position_ids.shape[1] != 1 or torch.is_grad_enabled():
            return False
        if not is_plain(self.cells, nn.LSTM):
            return False
        if isinstance(layout, AlignedLayout):
            ids = positions.segment_ids
            return is_readable(ids) and bool(ids.numpy().min() > PADDING_SEGMENT)
        return isinstance(layout, ContiguousLayout)

    def _read_rows(
        self, x: Float[Tensor, "b l d"], earlier: LSTMState, *, begins: bool
    ) -> tuple[Float[Tensor, "b l d"], LSTMState]:
        """The outputs of rows of one document each, which begins here or continues from the state.

        Raises UserError in an exported graph of any length."""
        refuse_any_size(x.shape[1], "an LSTM is a loop over tokens")
        # made from the tokens: under `vmap` a state without their hidden axis could not be added to in place
        initial = [torch.zeros_like(x[:, 0]) if begins else part.detach().to(x) for part in earlier]
        with self._differentiable_kernels(x):
            y, final_states = self.cells(x, tuple(part[None] for part in initial))
        return y, LSTMState(*(part[0].detach() for part in final_states))

    def _differentiable_kernels(self, x: Tensor) -> AbstractContextManager[None]:
        """Leave cuDNN's kernel alone in evaluation mode where gradients are asked for: it keeps nothing for them.

        The kernel of a CPU has no derivative but that."""
        if needs_plain_operations():
            return torch.backends.mkldnn.flags(enabled=False)
        if self.training or not compiles_attention(x.device) or not torch.is_grad_enabled():
            return nullcontext()
        return torch.backends.cudnn.flags(enabled=False)

    # outside compiled code, which would recompile for every number of documents
    @compiler_disabled
    def _read_runs(
        self, x: Float[Tensor, "b l d"], runs: DocumentRuns, positions: TokenPositions, earlier: LSTMState
    ) -> tuple[Float[Tensor, "n d"], LSTMState]:
        """The outputs for the tokens of all runs, and the state after the last run of each row."""
        # one sequence for each run, padded at its end: what torch packs
        sequences = x.new_zeros(len(runs.lengths), int(runs.lengths.max()), self.dim)
        sequences = sequences.index_put((runs.run, runs.rank), x[runs.rows, runs.columns])
        rows = runs.rows[runs.starts]
        columns = runs.columns[runs.starts]
        # a run that does not begin a document continues the one of the row's state
        continues = positions.position_ids.expand(x.shape[:2])[rows, columns, None] != 0
        initial = [torch.where(continues, part.detach().to(x)[rows], 0.0)[None] for part in earlier]
        packed = pack_padded_sequence(sequences, runs.lengths, batch_first=True, enforce_sorted=False)
        with self._differentiable_kernels(x):
            outputs, final_states = self.cells(packed, tuple(initial))
        padded, _ = pad_packed_sequence(outputs, batch_first=True)
        next_state = (
            # rows without a token keep the state they had
            part.to(x).index_put((rows[runs.last],), final[0, runs.last].detach())
            for part, final in zip(earlier, final_states)
        )
        return padded[runs.run, runs.rank], LSTMState(*next_state)


def _read_token(
    x: Float[Tensor, "b 1 d"], positions: TokenPositions, state: LSTMState, weights: Sequence[Tensor]
) -> tuple[Float[Tensor, "b 1 d"], LSTMState]:
    """The output and the state after one token per row, which may begin a document."""
    continues = positions.position_ids != 0
    hidden, cell = torch.lstm_cell(x[:, 0], [part * continues for part in state], *weights)
    return hidden[:, None], LSTMState(hidden, cell)
