"""Learned numbers for pairs of positions, whatever the tokens there are."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import ContiguousLayout, TokenPositions


class PositionPairs(nn.Module, ABC):
    """A number for every pair of positions below `max_length`, for each of `heads`."""

    def __init__(self, max_length: int, heads: int) -> None:
        super().__init__()
        for name, value in (("max_length", max_length), ("heads", heads)):
            if value < 1:
                raise ValueError(f"{type(self).__name__}: {name} ({value}) must be at least 1")
        self.max_length, self.heads = max_length, heads

    @abstractmethod
    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        """For queries `query_positions` and keys `key_positions`. Raises ValueError for a position that does not exist,
        where that is free.
        """

    if TYPE_CHECKING:

        def __call__(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Tensor: ...

    def extra_repr(self) -> str:
        return f"{self.max_length} positions, heads={self.heads}"


@final
class PairTable(PositionPairs):
    """A number of its own for every pair, from N(0, std^2); with `trained` false they stay as they are drawn."""

    def __init__(self, max_length: int, *, heads: int = 1, std: float, trained: bool = True) -> None:
        super().__init__(max_length, heads)
        self.weight = nn.Parameter(torch.randn(heads, max_length, max_length) * std, requires_grad=trained)

    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        if isinstance(query_positions.layout, ContiguousLayout) and isinstance(key_positions.layout, ContiguousLayout):
            # a copy, as torch's counter of operations fails where a module returns a view of a parameter
            return self.weight[
                None,
                :,
                position_index(query_positions, self.max_length),
                position_index(key_positions, self.max_length),
            ].clone()
        check_positions(self.max_length, query_positions, key_positions)
        return self.weight[:, query_positions.position_ids[:, :, None], key_positions.position_ids[:, None]].transpose(
            0, 1
        )


@final
class FactorizedPairs(PositionPairs):
    """The product of a row's vector and a column's, `rank` numbers each (Tay et al. 2021, section 3.3)."""

    def __init__(self, max_length: int, rank: int, *, heads: int = 1, std: float) -> None:
        super().__init__(max_length, heads)
        # a product of two has the variance rank * (std / sqrt(rank))^2 = std^2
        scale = (std / rank**0.5) ** 0.5
        self.row = nn.Parameter(torch.randn(heads, max_length, rank) * scale)
        self.column = nn.Parameter(torch.randn(heads, max_length, rank) * scale)

    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        row, column = (
            self.row[:, position_index(query_positions, self.max_length)],
            self.column[:, position_index(key_positions, self.max_length)],
        )
        if row.ndim == 3:
            row = row[:, None]
        if column.ndim == 3:
            column = column[:, None]
        return (row @ column.mT).transpose(0, 1)


@final
class ToeplitzPairs(PositionPairs):
    """A number for each distance: a Toeplitz matrix (Liu et al. 2021, section 4)."""

    def __init__(self, max_length: int, *, heads: int = 1, std: float) -> None:
        super().__init__(max_length, heads)
        self.weight = nn.Parameter(torch.randn(heads, 2 * max_length - 1) * std)

    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        check_positions(self.max_length, query_positions, key_positions)
        rows, columns = (
            place.position_ids[:1] if isinstance(place.layout, ContiguousLayout) else place.position_ids
            for place in (query_positions, key_positions)
        )
        distance = rows[:, :, None] - columns[:, None] + self.max_length - 1
        return self.weight[:, distance].transpose(0, 1)


def position_index(positions: TokenPositions, max_length: int) -> slice | Int[Tensor, "b l"]:
    """The positions of a place as an index into something that has `max_length` of them.

    Raises ValueError where there are too few, if telling so is free.
    """
    if isinstance(positions.layout, ContiguousLayout):
        first, last = positions.layout.start, positions.layout.start + positions.position_ids.shape[1]
        _check(last - 1, max_length)
        return slice(first, last)
    if positions.position_ids.device.type == "cpu" and positions.position_ids.numel():
        _check(int(positions.position_ids.max()), max_length)
    return positions.position_ids


def check_positions(max_length: int, *places: TokenPositions) -> None:
    """Raise ValueError where a place has positions beyond `max_length`, if telling so is free."""
    for place in places:
        position_index(place, max_length)


def _check(last: int, max_length: int) -> None:
    if last >= max_length:
        raise ValueError(f"position {last} does not exist: the model was built for longest={max_length}")
