"""Learned weights for pairs of positions, independent of the tokens."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import ContiguousLayout, StepLayout, TokenPositions
from manyformer.device_reads import is_readable
from manyformer.head_selection import PerHeadTensors
from manyformer.training_hooks import UndecayedParameters


class PositionPairs(PerHeadTensors, ABC):
    """A weight for every pair of positions below `max_length`, for each of `heads`."""

    def __init__(self, max_length: int, heads: int) -> None:
        super().__init__()
        for argument, value in (("max_length", max_length), ("heads", heads)):
            if value < 1:
                raise ValueError(f"{type(self).__name__}: {argument} ({value}) must be at least 1")
        self.max_length = max_length
        self.heads = heads

    @abstractmethod
    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        """The weights of all query-key pairs.

        Raises ValueError for a position that does not exist, unless checking it would synchronize a GPU.
        """

    if TYPE_CHECKING:

        def __call__(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Tensor: ...

    def extra_repr(self) -> str:
        return f"{self.max_length} positions, heads={self.heads}"


@final
class PairTable(PositionPairs):
    """A separate weight for every pair, drawn from N(0, std^2), and fixed if `trainable` is false."""

    head_axes = (("weight", -3),)

    def __init__(self, max_length: int, *, heads: int = 1, std: float, trainable: bool = True) -> None:
        super().__init__(max_length, heads)
        self.weight = nn.Parameter(torch.randn(heads, max_length, max_length) * std, requires_grad=trainable)

    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        if isinstance(query_positions.layout, ContiguousLayout) and isinstance(key_positions.layout, ContiguousLayout):
            # a copy, because torch's flop counter fails if a module returns a view of a parameter
            rows, columns = (position_index(part, self.max_length) for part in (query_positions, key_positions))
            return self.weight[None, :, rows, columns].clone()
        check_positions(self.max_length, query_positions, key_positions)
        pairs = self.weight[:, query_positions.position_ids[:, :, None], key_positions.position_ids[:, None]]
        return pairs.transpose(0, 1)


@final
class FactorizedPairs(PositionPairs):
    """The product of a query position's and a key position's vector, both of size `rank` (Tay et al. 2021, 3.3)."""

    head_axes = (("row", -3), ("column", -3))

    def __init__(self, max_length: int, rank: int, *, heads: int = 1, std: float) -> None:
        super().__init__(max_length, heads)
        # the products have a variance of rank * (std / sqrt(rank))^2 = std^2
        scale = (std / rank**0.5) ** 0.5
        self.row = nn.Parameter(torch.randn(heads, max_length, rank) * scale)
        self.column = nn.Parameter(torch.randn(heads, max_length, rank) * scale)

    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        row, column = (
            vectors[:, position_index(positions, self.max_length)]
            for vectors, positions in ((self.row, query_positions), (self.column, key_positions))
        )
        row, column = (part[:, None] if part.ndim == 3 else part for part in (row, column))
        return (row @ column.mT).transpose(0, 1)


@final
class ToeplitzPairs(PositionPairs, UndecayedParameters):
    """A weight for each signed distance: a Toeplitz matrix (Liu et al. 2021, section 4)."""

    undecayed = ("weight",)

    head_axes = (("weight", -2),)

    def __init__(self, max_length: int, *, heads: int = 1, std: float) -> None:
        super().__init__(max_length, heads)
        self.weight = nn.Parameter(torch.randn(heads, 2 * max_length - 1) * std)

    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        check_positions(self.max_length, query_positions, key_positions)
        query_ids, key_ids = (
            positions.position_ids[:1] if isinstance(positions.layout, ContiguousLayout) else positions.position_ids
            for positions in (query_positions, key_positions)
        )
        distances = query_ids[:, :, None] - key_ids[:, None] + self.max_length - 1
        return self.weight[:, distances].transpose(0, 1)


def position_index(positions: TokenPositions, max_length: int) -> slice | Int[Tensor, "b l"]:
    """The position ids as an index into a table of `max_length` positions.

    Raises ValueError for a position beyond the table, unless checking it would synchronize a GPU.
    """
    if isinstance(positions.layout, StepLayout):
        return positions.position_ids
    if isinstance(positions.layout, ContiguousLayout):
        start = positions.layout.start
        stop = positions.layout.start + positions.position_ids.shape[1]
        _check_position(stop - 1, max_length)
        return slice(start, stop)
    if is_readable(positions.position_ids) and positions.position_ids.numel():
        _check_position(int(positions.position_ids.max()), max_length)
    return positions.position_ids


def check_positions(max_length: int, *positions: TokenPositions) -> None:
    """Raise ValueError for a position beyond `max_length`, unless checking it would synchronize a GPU."""
    if any(isinstance(sequence_positions.layout, StepLayout) for sequence_positions in positions):
        return
    for sequence_positions in positions:
        position_index(sequence_positions, max_length)


def _check_position(last: int, max_length: int) -> None:
    if last >= max_length:
        raise ValueError(f"position {last} does not exist: the model was built for max_length={max_length}")
