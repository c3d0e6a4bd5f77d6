"""Some tokens of a stream by themselves: gathered, so that nothing is computed for all others, and put back."""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, Context, MemorySequence, State, TokenPositions, tree_map


class TokenGroup(ABC):
    """Tokens that are worked on together; `positions` is where they are."""

    positions: TokenPositions

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """Of what there is for every token, (b, l, ...), that of these tokens, (r, n, ...)."""

    @abstractmethod
    def scatter(self, into: Tensor, new: Tensor) -> Tensor:
        """`into` (b, l, ...), with what is new of these tokens."""

    @abstractmethod
    def select_rows(self, state: State) -> State:
        """Of a tree of tensors the rows that have any of these tokens."""

    def context(self, ctx: Context) -> Context:
        """What a call shares that works on these tokens alone."""
        memory = None if ctx.memory is None else self._memory(ctx.memory)
        return Context(self.positions, memory, ctx.watch)

    def _memory(self, memory: MemorySequence) -> MemorySequence:
        place = self.select_rows(memory.positions._replace(layout=None))
        return MemorySequence(self.select_rows(memory.y), place)


@final
class AllTokens(TokenGroup):
    """All tokens; `changing` are those of which something new is put back, None for all."""

    def __init__(self, positions: TokenPositions, changing: Bool[Tensor, "b l"] | None = None) -> None:
        self.positions, self.changing = positions, changing

    def gather(self, x: Tensor) -> Tensor:
        return x

    def scatter(self, into: Tensor, new: Tensor) -> Tensor:
        if self.changing is None:
            return new
        changing = self.changing.view(*self.changing.shape, *(1 for _ in into.shape[2:]))
        return torch.where(changing, new, into)

    def select_rows(self, state: State) -> State:
        return state

    def context(self, ctx: Context) -> Context:
        return ctx


@final
class TokenSubset(TokenGroup):
    """The tokens in `chosen`, side by side at the left of the rows that have any; what is empty counts as padding.

    `token_index` and `packed_index` are the numbers of the tokens in the stream, and here, where rows lie end to end;
    `row` are the numbers of the rows."""

    def __init__(self, positions: TokenPositions, chosen: Bool[Tensor, "b l"]) -> None:
        self.chosen = chosen
        self.row = chosen.any(1).nonzero()[:, 0]
        mine = chosen[self.row]
        column = mine.cumsum(1) - 1
        self.width = int(column.max()) + 1
        self.token_index = chosen.flatten().nonzero()[:, 0]
        first = torch.arange(len(self.row), device=chosen.device)[:, None] * self.width
        self.packed_index = (first + column)[mine]
        fields = [
            None if x is None else self.gather(x.expand(chosen.shape))
            for x in (positions.position_ids, positions.roles, positions.part_ids)
        ]
        tree = None if positions.tree is None else type(positions.tree)(*(self.gather(x) for x in positions.tree))
        # what is empty belongs to no segment
        seg = self.gather(positions.segment_ids.expand(chosen.shape) - PADDING_SEGMENT) + PADDING_SEGMENT
        assert fields[0] is not None
        self.positions = TokenPositions(fields[0], seg, None, tree, fields[1], fields[2])

    def gather(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)[self.token_index]
        empty = x.new_zeros(len(self.row) * self.width, *x.shape[2:])
        return empty.index_copy(0, self.packed_index, tokens).view(len(self.row), self.width, *x.shape[2:])

    def scatter(self, into: Tensor, new: Tensor) -> Tensor:
        tokens = new.flatten(0, 1)[self.packed_index]
        return into.flatten(0, 1).index_copy(0, self.token_index, tokens.to(into.dtype)).view(into.shape)

    def select_rows(self, state: State) -> State:
        if len(self.row) == len(self.chosen):
            return state
        return tree_map(lambda x: x[self.row], state)


def flatten_chosen(
    x: Float[Tensor, "b l d"], positions: TokenPositions, chosen: Bool[Tensor, "b l"]
) -> tuple[Tensor, TokenPositions, Tensor]:
    """The chosen tokens end to end as one row, (1, n, d), their positions, and their numbers in the stream."""
    token = chosen.flatten().nonzero()[:, 0]
    pos = positions.position_ids.expand(chosen.shape).flatten()[token][None]
    return x.flatten(0, 1)[token][None], TokenPositions(pos, torch.zeros_like(pos)), token
