"""Positions in images and other arrays that are read as one sequence, the last axis running fastest."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.position.absolute import Absolute


class Grid(Absolute):
    """A position for each axis of an array of this `shape`: (height, width), (height, width, channels), and so on.

    Position `before` is the first cell: tokens before the array (a start token, a class token) get nothing added. The
    vectors of the axes are put together by a subclass. Where the array is not read in its own order, `order` says which
    cell each position is.
    """

    def __init__(
        self,
        shape: Sequence[int],
        axes: Sequence[Absolute],
        *,
        before: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if not shape or min(shape) < 1:
            raise ValueError(f"{type(self).__name__}: shape {tuple(shape)} must have sizes of at least 1")
        if len(shape) != len(axes):
            raise ValueError(f"{type(self).__name__}: {len(shape)} sizes need as many positions, not {len(axes)}")
        for number, (size, axis) in enumerate(zip(shape, axes)):
            if axis.longest is not None and axis.longest < size:
                raise ValueError(f"axis {number} has {size} steps, and its position has longest={axis.longest}")
        self.shape, self.before = tuple(shape), before
        self.cells = before + math.prod(shape)
        self.longest = self.cells
        if order is not None and sorted(order) != list(range(math.prod(shape))):
            raise ValueError(f"{type(self).__name__}: order must name each of the {math.prod(shape)} cells once")
        self.register_buffer("order", None if order is None else torch.tensor(order), persistent=False)
        self.order: Tensor | None
        self.axes = nn.ModuleList(axes)

    def coordinates(self, pos: Int[Tensor, "*p"]) -> list[Int[Tensor, "*p"]]:
        """Where each position lies along each axis; tokens before the array are taken for its first cell."""
        rest = (pos - self.before).clamp(min=0)
        if self.order is not None:
            rest = self.order[rest]
        found: list[Tensor] = []
        for size in reversed(self.shape):
            found.append(rest % size)
            rest = rest // size
        return found[::-1]

    def rows(self, pos: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        if pos.device.type == "cpu" and pos.numel() and (last := int(pos.max())) >= self.cells:
            held = f"{' x '.join(map(str, self.shape))} cells after {self.before} tokens"
            raise ValueError(f"position {last} does not exist: the model was built for {held}")
        parts = [axis.rows(where) for axis, where in zip(self._axes(), self.coordinates(pos))]
        joined = self._join(parts)
        return joined if not self.before else torch.where((pos >= self.before)[..., None], joined, 0.0)

    def extra_repr(self) -> str:
        return f"{self.shape}" + (f", before={self.before}" if self.before else "")

    @abstractmethod
    def _join(self, parts: list[Tensor]) -> Tensor: ...

    def _axes(self) -> list[Absolute]:
        return list(self.axes)  # type: ignore[arg-type]


@final
class GridSum(Grid):
    """The axes' vectors added up, each as wide as the stream.

    With `Learned` for row, column and channel these are the data embeddings of Child et al. (2019, Generating Long
    Sequences with Sparse Transformers, section 5.3).
    """

    def _join(self, parts: list[Tensor]) -> Tensor:
        return sum(parts[1:], parts[0])


@final
class GridConcat(Grid):
    """The axes' vectors one after the other, their widths adding up to the stream's.

    With `Sinusoid` for row and column, each half as wide as the stream, this is the encoding of Parmar et al. (2018,
    Image Transformer, section 3.1); with `Learned` the axial embedding of Trax's Reformer.
    """

    def _join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=-1)
