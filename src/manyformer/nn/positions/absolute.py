"""Absolute positions: a vector for each position, in a text or in an array, that is added to the embeddings."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, StepLayout, TokenPositions
from manyformer.nn.positions.position import Position
from manyformer.nn.runtime.device_reads import ConstantTensor, is_readable
from manyformer.nn.runtime.devices import float64_device
from manyformer.nn.runtime.torch_internals import is_traced
from manyformer.nn.runtime.training_hooks import OptionalOnLoad

SinusoidLayout = Literal["interleaved", "halves", "timing"]
"""Sine and cosine alternating, as in the paper; all sines first, as in Marian; or Tensor2Tensor's timing signal."""

MIN_TABLE_ROWS = 512
"""Positions for which sines and cosines are computed at least."""

DEFAULT_BASE = 10_000.0
"""The largest wavelength is about 2 pi times this."""


def sinusoid_table(
    position_ids: Int[Tensor, "*p"],
    dim: int,
    layout: SinusoidLayout = "interleaved",
    *,
    base: float = DEFAULT_BASE,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*p d"]:
    """sin(pos / 10000^(2i/dim)) and its cosine for each i below dim / 2 (Vaswani et al. 2017, section 3.5).

    `base` replaces 10000. "halves" has the same frequencies in another order. "timing" has the order of "halves", but
    its last frequency is 1/10000 itself: pos / 10000^(i / (dim/2 - 1)), in Tensor2Tensor, fairseq and therefore in the
    Universal Transformer's code. Angles are taken in float64, and the result is rounded to `dtype`.
    """
    half = dim // 2
    steps = max(half - 1, 1) if layout == "timing" else half
    device = position_ids.device
    position_ids = position_ids.to(float64_device(device))
    pair = torch.arange(half, device=position_ids.device, dtype=torch.float64)
    frequencies = torch.exp(pair * (-math.log(base) / steps))
    angles = position_ids[..., None].double() * frequencies
    if layout == "interleaved":
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype).to(device)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype).to(device)


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of constants for a model of `dtype`: float32, in which positions do not collide, or more."""
    return torch.promote_types(dtype, torch.float32)


def check_sinusoid(dim: int, layout: str, owner: str, *, base: float = DEFAULT_BASE) -> None:
    """Raise ValueError if `dim` is odd or below 2, `base` is at most 1, or `layout` is no `SinusoidLayout`."""
    if not base > 1:
        raise ValueError(f"{owner}: base ({base}) must be above 1, so that wavelengths increase")
    if dim < 2 or dim % 2:
        raise ValueError(f"{owner}: dim ({dim}) must be even, each frequency has a sine and a cosine")
    if layout not in get_args(SinusoidLayout):
        raise ValueError(f"{owner}: layout ('{layout}') must be one of {', '.join(get_args(SinusoidLayout))}")


class AbsolutePosition(Position, ABC):
    """A position encoding that adds a vector per position."""

    @abstractmethod
    def rows(self, position_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        """The vectors of these positions. On a CPU, raises ValueError for a position that does not exist."""

    def known_rows(self, position_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        """`rows` of positions that exist, so that none of them need be read."""
        return self.rows(position_ids)

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if isinstance(positions.layout, ContiguousLayout):
            return x + self.rows(positions.position_ids[:1]).to(x.dtype)
        # only tensors know the position of a static step, and its limit says that it exists
        if isinstance(positions.layout, StepLayout):
            return x + self.known_rows(positions.position_ids).to(x.dtype)
        # the position ids of padding have no meaning and may be outside the table
        position_ids = torch.where(positions.segment_ids == PADDING_SEGMENT, 0, positions.position_ids)
        return x + self.rows(position_ids).to(x.dtype)


@final
class SinusoidalPosition(AbsolutePosition):
    """Fixed sines and cosines of geometric wavelengths, for any position (Vaswani et al. 2017, section 3.5).

    Channel 2i is sin(pos / 10000^(2i/dim)) and channel 2i+1 its cosine, as in the paper; with `layout="halves"` all
    sines come first, as in Marian; "timing" is Tensor2Tensor's signal, with other frequencies. A `base` below
    10000 avoids wavelengths much longer than the sequence. Angles are taken in float64 and the table is stored in
    float32, so that positions do not collide in half precision, or in float64 for a model of that precision.
    """

    def __init__(self, dim: int, *, layout: SinusoidLayout = "interleaved", base: float = DEFAULT_BASE) -> None:
        super().__init__()
        check_sinusoid(dim, layout, "SinusoidalPosition", base=base)
        self.dim = dim
        self.base = base
        self.layout: SinusoidLayout = layout
        # no buffer: it follows from the settings, also where a model is built without memory
        self._table: Tensor | None = None

    def rows(self, position_ids: Int[Tensor, "*p"], dtype: torch.dtype = torch.float32) -> Float[Tensor, "*p d"]:
        # computed rather than looked up, so the largest position need not be known
        return sinusoid_table(position_ids, self.dim, self.layout, base=self.base, dtype=table_dtype(dtype))

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        # the table is one of float32, whatever the model has become
        if isinstance(positions.layout, ContiguousLayout) and x.dtype != torch.float64:
            start = positions.layout.start
            stop = positions.layout.start + x.shape[1]
            return x + self._table_rows(start, stop, x.device).to(x.dtype)
        return x + self.rows(positions.position_ids, x.dtype).to(x.dtype)

    def _table_rows(self, start: int, stop: int, device: torch.device) -> Float[Tensor, "l d"]:
        """The vectors of positions from `start` to `stop`, of a table that grows with them."""
        # a graph that is recorded computes them: a table with numbers is not its own, and has one length
        if is_traced():
            return self.rows(torch.arange(start, stop, device=device))
        table = self._table
        if table is None or stop > table.shape[0] or table.device != device:
            # outside inference mode, whose tensors could not be used in training later
            with torch.inference_mode(mode=False):
                table = self.rows(torch.arange(max(MIN_TABLE_ROWS, 2 * stop), device=device))
            self._table = table
        return table[start:stop]


@final
class LearnedPosition(AbsolutePosition):
    """A learned vector for each of `max_length` positions (Gehring et al. 2017, section 3.1).

    They are initialized with the sines and cosines of `SinusoidalPosition`, scaled to a standard deviation of about
    `std`, where the papers draw random vectors: adjacent positions then have similar vectors from the first step, and a
    small character language model reaches 1.93 nats after 1,000 steps instead of 2.14."""

    def __init__(self, dim: int, max_length: int, *, std: float = 0.02) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"LearnedPosition: max_length ({max_length}) must be at least 1 position")
        self.max_length = max_length
        # sines and cosines have a mean square of one half
        self.weight = nn.Parameter(
            (sinusoid_table(torch.arange(max_length), dim + dim % 2)[:, :dim] * (std * math.sqrt(2))).to(
                torch.get_default_dtype()
            )
        )

    def rows(self, position_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        self._check_last(last_position(position_ids))
        return self.known_rows(position_ids)

    def known_rows(self, position_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        return nn.functional.embedding(position_ids, self.weight)

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if isinstance(positions.layout, ContiguousLayout):
            start = positions.layout.start
            stop = positions.layout.start + x.shape[1]
            self._check_last(stop - 1)
            return x + self.weight[start:stop]
        return super().embed(x, positions)

    def _check_last(self, last: int) -> None:
        if last >= self.weight.shape[0]:
            raise ValueError(
                f"position {last} does not exist: the model was built for max_length={self.weight.shape[0]}"
            )


def last_position(position_ids: Int[Tensor, "*p"]) -> int:
    """The largest position, or -1 if there is none or it cannot be read at no cost."""
    if is_readable(position_ids) and position_ids.numel():
        return int(position_ids.max())
    return -1


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
        self.order = None if order is None else ConstantTensor(tuple(order), torch.long)
        self.axes = nn.ModuleList(axes)

    def coordinates(self, position_ids: Int[Tensor, "*p"]) -> list[Int[Tensor, "*p"]]:
        """The coordinate of each position on each axis; tokens before the array get those of its first cell."""
        # tokens before the array have no cell; their vectors are zeroed afterwards
        cells = (position_ids - self.prefix_tokens).clamp(min=0)
        if self.order is not None:
            cells = self.order.on(cells.device)[cells]
        reversed_coordinates: list[Tensor] = []
        for size in reversed(self.shape):
            # row-major: the last axis changes fastest
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


@final
class SentenceTypePosition(Position, OptionalOnLoad):
    """Adds the vector of a token's sentence to its embedding (Devlin et al. 2019, section 3, "segment embeddings").

    The sentence is the part of the document, `part_ids`; the parts from `types` - 1 on have the last vector, and every
    token has the first one where no parts are given. Vectors are drawn from N(0, `std`^2)."""

    def __init__(self, dim: int, types: int, *, std: float) -> None:
        super().__init__()
        self.types = types
        self.weight = nn.Parameter(torch.randn(types, dim) * std)

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if positions.part_ids is None:
            return x + self.weight[0]
        return x + nn.functional.embedding(positions.part_ids.clamp(0, self.types - 1), self.weight)
