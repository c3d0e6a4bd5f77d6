"""Positions in images and other arrays that are flattened into one sequence in row-major order."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.position.absolute import AbsolutePosition, last_position


class GridPosition(AbsolutePosition):
    """A position per axis of an array of this `shape`: (height, width), (height, width, channels), and so on.

    Position `prefix_tokens` is the first cell: tokens before the array (a start token, a class token) get a zero
    vector. Subclasses combine the vectors of the axes. If the array is not read in row-major order, `order` holds the
    cell of each position."""

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
        for axis_index, (size, axis) in enumerate(zip(shape, axes)):
            if axis.max_length is not None and axis.max_length < size:
                raise ValueError(
                    f"axis {axis_index} has {size} steps, but its position has max_length={axis.max_length}"
                )
        self.shape = tuple(shape)
        self.prefix_tokens = prefix_tokens
        self.max_length: int = prefix_tokens + math.prod(shape)
        if order is not None and sorted(order) != list(range(math.prod(shape))):
            raise ValueError(f"{type(self).__name__}: order must name each of the {math.prod(shape)} cells once")
        self.register_buffer("order", None if order is None else torch.tensor(order), persistent=False)
        self.order: Tensor | None
        self.axes = nn.ModuleList(axes)

    def coordinates(self, position_ids: Int[Tensor, "*p"]) -> list[Int[Tensor, "*p"]]:
        """The coordinate of each position on each axis; tokens before the array get those of its first cell."""
        cells = (position_ids - self.prefix_tokens).clamp(min=0)
        if self.order is not None:
            cells = self.order[cells]
        reversed_coordinates: list[Tensor] = []
        for size in reversed(self.shape):
            reversed_coordinates.append(cells % size)
            cells = cells // size
        return reversed_coordinates[::-1]

    def rows(self, position_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        if (last := last_position(position_ids)) >= self.max_length:
            description = f"{' x '.join(map(str, self.shape))} cells after {self.prefix_tokens} tokens"
            raise ValueError(f"position {last} does not exist: the model was built for {description}")
        return self.known_rows(position_ids)

    def known_rows(self, position_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        by_axis = zip(self._axes(), self.coordinates(position_ids))
        axis_vectors = [axis.known_rows(coordinate) for axis, coordinate in by_axis]
        vectors = self._combine(axis_vectors)
        if not self.prefix_tokens:
            return vectors
        return torch.where((position_ids >= self.prefix_tokens)[..., None], vectors, 0.0)

    def extra_repr(self) -> str:
        return f"{self.shape}" + (f", prefix_tokens={self.prefix_tokens}" if self.prefix_tokens else "")

    @abstractmethod
    def _combine(self, axis_vectors: list[Tensor]) -> Tensor: ...

    def _axes(self) -> list[AbsolutePosition]:
        return list(self.axes)  # type: ignore[arg-type]


@final
class SummedGridPosition(GridPosition):
    """The sum of the axes' vectors, each as wide as the residual stream.

    With `LearnedPosition` for row, column and channel these are the data embeddings of Child et al. (2019, Generating
    Long Sequences with Sparse Transformers, section 5.3).
    """

    def _combine(self, axis_vectors: list[Tensor]) -> Tensor:
        return sum(axis_vectors[1:], axis_vectors[0])


@final
class ConcatenatedGridPosition(GridPosition):
    """The concatenation of the axes' vectors, whose widths add up to that of the residual stream.

    With `SinusoidalPosition` for row and column, each half as wide as the stream, this is the encoding of Parmar et al.
    (2018, Image Transformer, section 3.1); with `LearnedPosition` the axial embedding of Trax's Reformer."""

    def _combine(self, axis_vectors: list[Tensor]) -> Tensor:
        return torch.cat(axis_vectors, dim=-1)
