"""Subsets of the tokens of a stream: gathered into shorter rows for a computation, and scattered back."""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, Context, MemorySequence, State, TokenPositions, tree_map


class TokenGroup(ABC):
    """The tokens that a step computes, with their `positions`."""

    positions: TokenPositions

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """The rows of `x` (b, l, ...) for the tokens of the group, (r, n, ...)."""

    @abstractmethod
    def scatter(self, target: Tensor, values: Tensor) -> Tensor:
        """`target` (b, l, ...) with the `values` (r, n, ...) of the group's tokens."""

    @abstractmethod
    def select_rows(self, state: State) -> State:
        """The rows of a tree of tensors that contain tokens of the group."""

    def context(self, ctx: Context) -> Context:
        """The context of a call with only the tokens of the group."""
        memory = None
        if ctx.memory is not None:
            memory = self._select_memory(ctx.memory)
        return Context(self.positions, memory, ctx.watch)

    def _select_memory(self, memory: MemorySequence) -> MemorySequence:
        positions = self.select_rows(memory.positions._replace(layout=None))
        return MemorySequence(self.select_rows(memory.y), positions)


@final
class AllTokens(TokenGroup):
    """All tokens; `scatter` writes only those of the mask `changing`, None for all."""

    def __init__(self, positions: TokenPositions, changing: Bool[Tensor, "b l"] | None = None) -> None:
        self.positions = positions
        self.changing = changing

    def gather(self, x: Tensor) -> Tensor:
        return x

    def scatter(self, target: Tensor, values: Tensor) -> Tensor:
        if self.changing is None:
            return values
        changing = self.changing.view(*self.changing.shape, *(1 for _ in target.shape[2:]))
        return torch.where(changing, values, target)

    def select_rows(self, state: State) -> State:
        return state

    def context(self, ctx: Context) -> Context:
        return ctx


@final
class TokenSubset(TokenGroup):
    """The tokens of the mask `chosen`, packed to the left in the rows that have any; empty columns are padding.

    `token_index` and `packed_index` are the flat indices of the tokens in the stream and in the packed rows;
    `row_index` are the indices of the rows."""

    def __init__(self, positions: TokenPositions, chosen: Bool[Tensor, "b l"]) -> None:
        self.chosen = chosen
        self.row_index = chosen.any(1).nonzero()[:, 0]
        chosen_rows = chosen[self.row_index]
        column = chosen_rows.cumsum(1) - 1
        self.width = int(column.max()) + 1
        self.token_index = chosen.flatten().nonzero()[:, 0]
        row_starts = torch.arange(len(self.row_index), device=chosen.device)[:, None] * self.width
        self.packed_index = (row_starts + column)[chosen_rows]
        fields = [
            None if x is None else self.gather(x.expand(chosen.shape))
            for x in (positions.position_ids, positions.roles, positions.part_ids)
        ]
        tree = None
        if positions.tree is not None:
            tree = type(positions.tree)(*(self.gather(x) for x in positions.tree))
        # empty columns become padding
        segment_ids = self.gather(positions.segment_ids.expand(chosen.shape) - PADDING_SEGMENT) + PADDING_SEGMENT
        assert fields[0] is not None
        self.positions = TokenPositions(fields[0], segment_ids, None, tree, fields[1], fields[2])

    def gather(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)[self.token_index]
        empty = x.new_zeros(len(self.row_index) * self.width, *x.shape[2:])
        return empty.index_copy(0, self.packed_index, tokens).view(len(self.row_index), self.width, *x.shape[2:])

    def scatter(self, target: Tensor, values: Tensor) -> Tensor:
        tokens = values.flatten(0, 1)[self.packed_index]
        return target.flatten(0, 1).index_copy(0, self.token_index, tokens.to(target.dtype)).view(target.shape)

    def select_rows(self, state: State) -> State:
        if len(self.row_index) == len(self.chosen):
            return state
        return tree_map(lambda x: x[self.row_index], state)


def flatten_chosen(
    x: Float[Tensor, "b l d"], positions: TokenPositions, chosen: Bool[Tensor, "b l"]
) -> tuple[Tensor, TokenPositions, Tensor]:
    """The chosen tokens concatenated to one row (1, n, d), their positions, and their flat indices in the stream."""
    token_index = chosen.flatten().nonzero()[:, 0]
    position_ids = positions.position_ids.expand(chosen.shape).flatten()[token_index][None]
    return x.flatten(0, 1)[token_index][None], TokenPositions(position_ids, torch.zeros_like(position_ids)), token_index
