"""Learned numbers for pairs of positions, whatever the tokens there are."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import Place, Plain


class Pairs(nn.Module, ABC):
    """A number for every pair of positions below `longest`, for each of `heads`."""

    def __init__(self, longest: int, heads: int) -> None:
        super().__init__()
        for name, value in (("longest", longest), ("heads", heads)):
            if value < 1:
                raise ValueError(f"{type(self).__name__}: {name} ({value}) must be at least 1")
        self.longest, self.heads = longest, heads

    @abstractmethod
    def forward(self, at: Place, of: Place) -> Float[Tensor, "#b h l s"]:
        """For queries `at` and keys `of`. Raises ValueError for a position that does not exist, where that is free."""

    if TYPE_CHECKING:

        def __call__(self, at: Place, of: Place) -> Tensor: ...

    def extra_repr(self) -> str:
        return f"{self.longest} positions, heads={self.heads}"


@final
class Table(Pairs):
    """A number of its own for every pair, from N(0, std^2); with `trained` false they stay as they are drawn."""

    def __init__(self, longest: int, *, heads: int = 1, std: float, trained: bool = True) -> None:
        super().__init__(longest, heads)
        self.weight = nn.Parameter(torch.randn(heads, longest, longest) * std, requires_grad=trained)

    def forward(self, at: Place, of: Place) -> Float[Tensor, "#b h l s"]:
        if isinstance(at.layout, Plain) and isinstance(of.layout, Plain):
            # a copy, as torch's counter of operations fails where a module returns a view of a parameter
            return self.weight[None, :, positions(at, self.longest), positions(of, self.longest)].clone()
        check_positions(self.longest, at, of)
        return self.weight[:, at.pos[:, :, None], of.pos[:, None]].transpose(0, 1)


@final
class Product(Pairs):
    """The product of a row's vector and a column's, `rank` numbers each (Tay et al. 2021, section 3.3)."""

    def __init__(self, longest: int, rank: int, *, heads: int = 1, std: float) -> None:
        super().__init__(longest, heads)
        # a product of two has the variance rank * (std / sqrt(rank))^2 = std^2
        scale = (std / rank**0.5) ** 0.5
        self.row = nn.Parameter(torch.randn(heads, longest, rank) * scale)
        self.column = nn.Parameter(torch.randn(heads, longest, rank) * scale)

    def forward(self, at: Place, of: Place) -> Float[Tensor, "#b h l s"]:
        row, column = self.row[:, positions(at, self.longest)], self.column[:, positions(of, self.longest)]
        if row.ndim == 3:
            row = row[:, None]
        if column.ndim == 3:
            column = column[:, None]
        return (row @ column.mT).transpose(0, 1)


@final
class Shifts(Pairs):
    """A number for each distance: a Toeplitz matrix (Liu et al. 2021, section 4)."""

    def __init__(self, longest: int, *, heads: int = 1, std: float) -> None:
        super().__init__(longest, heads)
        self.weight = nn.Parameter(torch.randn(heads, 2 * longest - 1) * std)

    def forward(self, at: Place, of: Place) -> Float[Tensor, "#b h l s"]:
        check_positions(self.longest, at, of)
        rows, columns = (place.pos[:1] if isinstance(place.layout, Plain) else place.pos for place in (at, of))
        distance = rows[:, :, None] - columns[:, None] + self.longest - 1
        return self.weight[:, distance].transpose(0, 1)


def positions(place: Place, longest: int) -> slice | Int[Tensor, "b l"]:
    """The positions of a place as an index into something that has `longest` of them.

    Raises ValueError where there are too few, if telling so is free.
    """
    if isinstance(place.layout, Plain):
        first, last = place.layout.start, place.layout.start + place.pos.shape[1]
        _check(last - 1, longest)
        return slice(first, last)
    if place.pos.device.type == "cpu" and place.pos.numel():
        _check(int(place.pos.max()), longest)
    return place.pos


def check_positions(longest: int, *places: Place) -> None:
    """Raise ValueError where a place has positions beyond `longest`, if telling so is free."""
    for place in places:
        positions(place, longest)


def _check(last: int, longest: int) -> None:
    if last >= longest:
        raise ValueError(f"position {last} does not exist: the model was built for longest={longest}")
