"""Positions that layers get again: signals for each step of a repeated layer, and encodings of each layer's own."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.core import PADDING_SEGMENT, Context, Layer, LayerOutput, State, TokenPositions
from manyformer.nn.positions.absolute import (
    AbsolutePosition,
    LearnedPosition,
    SinusoidLayout,
    check_sinusoid,
    sinusoid_table,
    table_dtype,
)
from manyformer.nn.positions.position import Position
from manyformer.nn.runtime.head_selection import HeadSelection, PerHeadTensors, head_channels, select_entries
from manyformer.nn.runtime.training_hooks import UndecayedParameters


class StepSignal(nn.Module, ABC):
    """A vector for each step of a recurrent layer; steps are counted from 0."""

    @abstractmethod
    def forward(self, step: int) -> Float[Tensor, " d"]: ...


@final
class SinusoidalStepSignal(StepSignal):
    """The sinusoid of the step number (Dehghani et al. 2019, section 2.1).

    The paper counts steps from 1, Tensor2Tensor from 0: `first_step` is the number of step 0.
    """

    def __init__(self, dim: int, *, layout: SinusoidLayout = "interleaved", first_step: int = 1) -> None:
        super().__init__()
        check_sinusoid(dim, layout, "SinusoidalStepSignal")
        self.dim = dim
        self.first_step = first_step
        self.layout: SinusoidLayout = layout
        # gives the device and the precision of the model, which has no parameter here; its value means nothing
        self.register_buffer("model_marker", torch.zeros(()), persistent=False)
        self.model_marker: Tensor

    def forward(self, step: int) -> Float[Tensor, " d"]:
        number = torch.full_like(self.model_marker, step + self.first_step, dtype=torch.long)
        return sinusoid_table(number, self.dim, self.layout, dtype=table_dtype(self.model_marker.dtype))


@final
class LearnedStepSignal(StepSignal, UndecayedParameters):
    """A learned vector for each of `max_length` steps, the default of Tensor2Tensor's Universal Transformer.

    As there, stored with a standard deviation of 1/sqrt(dim) and multiplied by sqrt(dim), so that it starts as N(0, 1).
    Raises ValueError for a step beyond the table.
    """

    undecayed = ("weight",)

    def __init__(self, dim: int, max_length: int) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"LearnedStepSignal: max_length ({max_length}) must be at least 1 step")
        self.weight = nn.Parameter(torch.randn(max_length, dim) / math.sqrt(dim))

    def forward(self, step: int) -> Float[Tensor, " d"]:
        if step >= len(self.weight):
            raise ValueError(f"step {step} does not exist: the table was built for max_length={len(self.weight)} steps")
        return self.weight[step] * math.sqrt(self.weight.shape[1])


@final
class NoStepSignal(StepSignal):
    """A zero signal: steps are not distinguished, and there may be more of them than in training."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        # gives the device and the precision of the model; its value means nothing
        self.register_buffer("model_marker", torch.zeros(()), persistent=False)
        self.model_marker: Tensor

    def forward(self, step: int) -> Float[Tensor, " d"]:
        return self.model_marker.new_zeros(self.dim)


@final
class PositionStepSignal(nn.Module):
    """The two-dimensional signal of the Universal Transformer: the vectors of position and step, added at every step.

    Dehghani et al. 2019, section 2.1: with `SinusoidalPosition` and `SinusoidalStepSignal` channel 2k of token i at
    step t gets sin(i r_k) + sin(t r_k), and channel 2k + 1 the cosines; both are summed, not concatenated, and stay in
    the residual stream. Tensor2Tensor uses `PositionStepSignal(SinusoidalPosition(dim, layout="timing"),
    LearnedStepSignal(dim, steps))`."""

    def __init__(self, position: AbsolutePosition, steps: StepSignal) -> None:
        super().__init__()
        self.position = position
        self.steps = steps
        self.max_length = position.max_length

    def forward(self, x: Float[Tensor, "b l d"], positions: TokenPositions, step: int) -> Float[Tensor, "b l d"]:
        """The input of step `step`, counted from 0: the residual stream plus both signals."""
        return self.add_signals(x, self.position_vectors(x, positions), step)

    def position_vectors(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        """The vectors of the positions, which are the same at every step."""
        # added to zeros, because an absolute position has no other way to give its vectors
        return self.position.embed(torch.zeros_like(x), positions)

    def add_signals(
        self, x: Float[Tensor, "b l d"], position_vectors: Float[Tensor, "b l d"], step: int
    ) -> Float[Tensor, "b l d"]:
        """The residual stream plus the vectors of its positions and of the step."""
        step_vector: Tensor = self.steps(step)
        return x + position_vectors + step_vector.to(x.dtype)


@final
class PositionLayer(Layer):
    """A layer that adds a position to the residual stream at its place in the stack, not only to the embeddings.

    Before each layer of a stack, each with its own `LearnedPosition`, it is the positional embedding per layer of
    Al-Rfou et al. 2019: attention and feed-forward both read it, and it stays in the residual stream."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        if attention_seams := position.required_seams() - {"embed"}:
            raise ValueError(
                f"PositionLayer: {type(position).__name__} acts on {sorted(attention_seams)} inside attention, "
                "not on the residual stream"
            )
        self.position = position

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        return LayerOutput(self.position.embed(x, ctx.positions), state)


@final
class LearnedQKPosition(Position, PerHeadTensors):
    """A learned vector per position added to queries, and another added to keys; the residual stream is unchanged.

    The second meaning of positions per layer: P W_q and P W_k for a table P added to the inputs of the query and key
    projections, each product learned as one table. Values, feed-forward layers and memories of hidden states do not
    depend on it.
    """

    def __init__(
        self, heads: int, width: int, max_length: int, *, kv_heads: int | None = None, std: float = 0.02
    ) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"LearnedQKPosition: max_length ({max_length}) must be at least 1 position")
        self.max_length = max_length
        self.queries = LearnedPosition(heads * width, max_length, std=std)
        self.keys = LearnedPosition((heads if kv_heads is None else kv_heads) * width, max_length, std=std)

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        return _add_per_head(q, self.queries, positions)

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        return _add_per_head(k, self.keys, positions)

    def keep_heads(self, selection: HeadSelection) -> None:
        # the channels of all heads are side by side in one table
        tables = (self.queries, selection.heads, selection.total), (self.keys, selection.kv_heads, selection.kv_total)
        for table, heads, total in tables:
            select_entries(table, "weight", head_channels(heads, table.weight.shape[1] // total), 1)


def _add_per_head(
    x: Float[Tensor, "b h l e"], table: LearnedPosition, positions: TokenPositions
) -> Float[Tensor, "b h l e"]:
    # the position ids of padding may be outside of the table
    rows = table.rows(torch.where(positions.segment_ids == PADDING_SEGMENT, 0, positions.position_ids))
    return x + rows.view(*rows.shape[:2], x.shape[1], x.shape[3]).transpose(1, 2)
