"""Some tokens of a stream by themselves: gathered, so that nothing is computed for all others, and put back."""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.core import PADDING, Context, Memory, Place, State, tree_map


class Group(ABC):
    """Tokens that are worked on together; `place` is where they are."""

    place: Place

    @abstractmethod
    def take(self, x: Tensor) -> Tensor:
        """Of what there is for every token, (b, l, ...), that of these tokens, (r, n, ...)."""

    @abstractmethod
    def put(self, into: Tensor, new: Tensor) -> Tensor:
        """`into` (b, l, ...), with what is new of these tokens."""

    @abstractmethod
    def rows(self, state: State) -> State:
        """Of a tree of tensors the rows that have any of these tokens."""

    def context(self, ctx: Context) -> Context:
        """What a call shares that works on these tokens alone."""
        memory = None if ctx.memory is None else self._memory(ctx.memory)
        return Context(self.place, memory, ctx.watch)

    def _memory(self, memory: Memory) -> Memory:
        place = self.rows(memory.place._replace(layout=None))
        return Memory(self.rows(memory.y), place)


@final
class Everybody(Group):
    """All tokens; `changing` are those of which something new is put back, None for all."""

    def __init__(self, place: Place, changing: Bool[Tensor, "b l"] | None = None) -> None:
        self.place, self.changing = place, changing

    def take(self, x: Tensor) -> Tensor:
        return x

    def put(self, into: Tensor, new: Tensor) -> Tensor:
        if self.changing is None:
            return new
        changing = self.changing.view(*self.changing.shape, *(1 for _ in into.shape[2:]))
        return torch.where(changing, new, into)

    def rows(self, state: State) -> State:
        return state

    def context(self, ctx: Context) -> Context:
        return ctx


@final
class Some(Group):
    """The tokens in `chosen`, side by side at the left of the rows that have any; what is empty counts as padding.

    `token` and `spot` are the numbers of the tokens in the stream, and here, where rows lie end to end; `row` are the
    numbers of the rows.
    """

    def __init__(self, place: Place, chosen: Bool[Tensor, "b l"]) -> None:
        self.chosen = chosen
        self.row = chosen.any(1).nonzero()[:, 0]
        mine = chosen[self.row]
        column = mine.cumsum(1) - 1
        self.width = int(column.max()) + 1
        self.token = chosen.flatten().nonzero()[:, 0]
        first = torch.arange(len(self.row), device=chosen.device)[:, None] * self.width
        self.spot = (first + column)[mine]
        fields = [None if x is None else self.take(x.expand(chosen.shape)) for x in (place.pos, place.role, place.part)]
        tree = None if place.tree is None else type(place.tree)(*(self.take(x) for x in place.tree))
        # what is empty belongs to no segment
        seg = self.take(place.seg.expand(chosen.shape) - PADDING) + PADDING
        assert fields[0] is not None
        self.place = Place(fields[0], seg, None, tree, fields[1], fields[2])

    def take(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)[self.token]
        empty = x.new_zeros(len(self.row) * self.width, *x.shape[2:])
        return empty.index_copy(0, self.spot, tokens).view(len(self.row), self.width, *x.shape[2:])

    def put(self, into: Tensor, new: Tensor) -> Tensor:
        tokens = new.flatten(0, 1)[self.spot]
        return into.flatten(0, 1).index_copy(0, self.token, tokens.to(into.dtype)).view(into.shape)

    def rows(self, state: State) -> State:
        if len(self.row) == len(self.chosen):
            return state
        return tree_map(lambda x: x[self.row], state)


def each(x: Float[Tensor, "b l d"], place: Place, chosen: Bool[Tensor, "b l"]) -> tuple[Tensor, Place, Tensor]:
    """The chosen tokens end to end as one row, (1, n, d), their positions, and their numbers in the stream."""
    token = chosen.flatten().nonzero()[:, 0]
    pos = place.pos.expand(chosen.shape).flatten()[token][None]
    return x.flatten(0, 1)[token][None], Place(pos, torch.zeros_like(pos)), token
