"""Depthwise convolutions of rows that are one document each, as sums of shifted rows."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyformer.ops.cpu_caches import block_elements


def convolve_rows(x: Float[Tensor, "b l d"], weight: Float[Tensor, "n d"], *, causal: bool) -> Float[Tensor, "b l d"]:
    """`convolve_neighbours` of rows that are one document each, for which zeros stand in place of padding.

    Half precision is summed in float32. On a CPU torch's grouped `conv1d`, which wants the channels before the tokens,
    takes five to eighteen times as long for 4 taps, and 0.8 times to twice as long for 31."""
    size = len(weight)
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    inputs = (part.to(compute_dtype) for part in (x, weight))
    y: Tensor = _ConvolveShifts.apply(*inputs, 1 - size if causal else -(size // 2))  # type: ignore[no-untyped-call]
    return y.to(x.dtype)


class _ConvolveShifts(torch.autograd.Function):
    """y_i = sum over taps n of w_n x_(i + offset + n), with zeros outside of a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offset: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.offset = offset
        return _sum_shifts(x, weight, offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _sum_shifts(dy, weight.flip(0), 1 - len(weight) - ctx.offset)
        if ctx.needs_input_grad[1]:
            dweight = torch.stack([_sum_products(x, dy, ctx.offset + tap) for tap in range(len(weight))])
        return dx, dweight, None


class _Block(NamedTuple):
    """Some rows, and the tokens [start, stop) of each."""

    rows: slice
    start: int
    stop: int

    def overlap(self, length: int, shift: int) -> tuple[slice, slice, slice]:
        """The tokens i of the block for which i + shift is in a row of `length`: in the block, in the row, shifted."""
        start = max(self.start, -shift)
        stop = max(start, min(self.stop, length - shift))
        in_block, in_row, shifted = (slice(start + move, stop + move) for move in (-self.start, 0, shift))
        return in_block, in_row, shifted


def _blocks(x: Float[Tensor, "b l d"]) -> Iterator[_Block]:
    """Blocks of which all taps are summed before they leave the caches of a CPU."""
    rows, length, channels = x.shape
    limit = block_elements(x)
    row_step = max(1, limit // max(1, length * channels))
    step = max(1, limit // max(1, channels))
    for row in range(0, rows, row_step):
        for start in range(0, length, step):
            yield _Block(slice(row, row + row_step), start, min(length, start + step))


def _sum_shifts(x: Float[Tensor, "b l d"], weight: Float[Tensor, "n d"], offset: int) -> Float[Tensor, "b l d"]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for block in _blocks(x):
        block_y = y[block.rows, block.start : block.stop]
        # the neighbours include the token itself, whose term needs no zeros to be added to
        torch.mul(x[block.rows, block.start : block.stop], weight[-offset], out=block_y)
        for tap, tap_weight in enumerate(weight):
            if tap != -offset:
                inner, _, shifted = block.overlap(x.shape[1], offset + tap)
                block_y[:, inner].addcmul_(x[block.rows, shifted], tap_weight)
    return y


def _sum_products(x: Float[Tensor, "b l d"], dy: Float[Tensor, "b l d"], shift: int) -> Float[Tensor, " d"]:
    """The sums over rows and tokens i of x_(i + shift) dy_i."""
    sums = None
    for block in _blocks(x):
        if sums is None:
            sums = x.new_zeros(x[block.rows, block.start : block.stop].shape)
        _, tokens, shifted = block.overlap(x.shape[1], shift)
        block_x = x[block.rows, shifted]
        sums[: len(block_x), : block_x.shape[1]].addcmul_(block_x, dy[block.rows, tokens])
    if sums is None:
        return x.new_zeros(x.shape[2])
    return sums.sum((0, 1))
