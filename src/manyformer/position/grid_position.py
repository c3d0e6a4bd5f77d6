"""Positions in images and other arrays that are read as one sequence, the last axis running fastest."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.position.absolute import AbsolutePosition


class GridPosition(AbsolutePosition):
    """A position for each axis of an array of this `shape`: (height, width), (height, width, channels), and so on.

    Position `prefix_tokens` is the first cell: tokens before the array (a start token, a class token) get nothing
    added. The vectors of the axes are put together by a subclass. Where the array is not read in its own order, `order`
    says which cell each position is."""

    def __init__(
        self,
        shape: Sequence[int],
        axes: Sequence[AbsolutePosition],
        *,
        prefix_tokens: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if not shape or min(shape) < 1:
            raise ValueError(f"{type(self).__name__}: shape {tuple(shape)} must have sizes of at least 1")
        if len(shape) != len(axes):
            raise ValueError(f"{type(self).__name__}: {len(shape)} sizes need as many positions, not {len(axes)}")
        for number, (size, axis) in enumerate(zip(shape, axes)):
            if axis.max_length is not None and axis.max_length < size:
                raise ValueError(f"axis {number} has {size} steps, and its position has longest={axis.max_length}")
        self.shape, self.prefix_tokens = tuple(shape), prefix_tokens
        self.cells = prefix_tokens + math.prod(shape)
        self.max_length = self.cells
        if order is not None and sorted(order) != list(range(math.prod(shape))):
            raise ValueError(f"{type(self).__name__}: order must name each of the {math.prod(shape)} cells once")
        self.register_buffer("order", None if order is None else torch.tensor(order), persistent=False)
        self.order: Tensor | None
        self.axes = nn.ModuleList(axes)

    def coordinates(self, pos: Int[Tensor, "*p"]) -> list[Int[Tensor, "*p"]]:
        """Where each position lies along each axis; tokens before the array are taken for its first cell."""
        rest = (pos - self.prefix_tokens).clamp(min=0)
        if self.order is not None:
            rest = self.order[rest]
        found: list[Tensor] = []
        for size in reversed(self.shape):
            found.append(rest % size)
            rest = rest // size
        return found[::-1]

    def rows(self, pos: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        if pos.device.type == "cpu" and pos.numel() and (last := int(pos.max())) >= self.cells:
            held = f"{' x '.join(map(str, self.shape))} cells after {self.prefix_tokens} tokens"
            raise ValueError(f"position {last} does not exist: the model was built for {held}")
        parts = [axis.rows(where) for axis, where in zip(self._axes(), self.coordinates(pos))]
        joined = self._join(parts)
        return joined if not self.prefix_tokens else torch.where((pos >= self.prefix_tokens)[..., None], joined, 0.0)

    def extra_repr(self) -> str:
        return f"{self.shape}" + (f", before={self.prefix_tokens}" if self.prefix_tokens else "")

    @abstractmethod
    def _join(self, parts: list[Tensor]) -> Tensor: ...

    def _axes(self) -> list[AbsolutePosition]:
        return list(self.axes)  # type: ignore[arg-type]


@final
class SummedGridPosition(GridPosition):
    """The axes' vectors added up, each as wide as the stream.

    With `Learned` for row, column and channel these are the data embeddings of Child et al. (2019, Generating Long
    Sequences with Sparse Transformers, section 5.3).
    """

    def _join(self, parts: list[Tensor]) -> Tensor:
        return sum(parts[1:], parts[0])


@final
class ConcatenatedGridPosition(GridPosition):
    """The axes' vectors one after the other, their widths adding up to the stream's.

    With `SinusoidalPosition` for row and column, each half as wide as the stream, this is the encoding of Parmar et al.
    (2018, Image Transformer, section 3.1); with `Learned` the axial embedding of Trax's Reformer."""

    def _join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=-1)
