"""Decayed products of all pairs of a chunk, by halves: no decay is too strong for it, and none is subtracted.

A pair of tokens i >= j has the factor exp of the sum of the log decays after j and up to i. Where i is in the second
half of a block and j in the first, that is a factor of i from the middle of the block times one of j up to the middle.
Both are at most 1, and sums of decays in between alone, so that they have no rounding error of decays elsewhere. Pairs
within a half are those of a smaller block. As the host need not know how strong decays are, a GPU is not read.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyformer.ops.decay_sums import sum_along_tokens, total_decay


def halved_pairs(
    rows: Float[Tensor, "*b c r"], columns: Float[Tensor, "*b c r"], decay: Float[Tensor, "*b c r"], lag: int
) -> Float[Tensor, "*b c c"]:
    """sum_d rows_id columns_jd exp(decay_(j+1)d + ... + decay_(i-lag)d) where j <= i - lag, else 0; `lag` is 0 or 1.

    Log decays are at most 0, and -inf is total."""
    length = rows.shape[-2]
    missing = (1 << (length - 1).bit_length()) - length
    if missing:
        rows, columns, decay = (F.pad(x, (0, 0, 0, missing)) for x in (rows, columns, decay))
    pairs: Tensor = _HalvedPairs.apply(rows, columns, decay, lag)  # type: ignore[no-untyped-call]
    if missing:
        return pairs[..., :length, :length]
    return pairs


class _Halves(NamedTuple):
    """The rows in second halves of blocks and the columns in first ones, with the factors of both."""

    rows: Float[Tensor, "*b n m r"]
    columns: Float[Tensor, "*b n m r"]
    to_rows: Float[Tensor, "*b n m r"]
    from_columns: Float[Tensor, "*b n m r"]


def _halves(x: Float[Tensor, "*b c r"], size: int) -> tuple[Float[Tensor, "*b n m r"], Float[Tensor, "*b n m r"]]:
    """Views of the first and the second halves, of `size` tokens each."""
    first, second = x.unflatten(-2, (-1, 2, size)).unbind(-3)  # type: ignore[no-untyped-call]
    return first, second


def _take_halves(rows: Tensor, columns: Tensor, decay: Tensor, size: int, lag: int) -> _Halves:
    earlier, later = _halves(decay, size)
    # up to the row, or the token before it
    to_rows = sum_along_tokens(later if not lag else F.pad(later[..., :-1, :], (0, 0, 1, 0)))
    # from the token after the column on
    from_columns = sum_along_tokens(F.pad(earlier[..., 1:, :], (0, 0, 0, 1)), reverse=True)
    return _Halves(_halves(rows, size)[1], _halves(columns, size)[0], to_rows.exp_(), from_columns.exp_())


class _HalvedPairs(torch.autograd.Function):
    """Factors are computed again for the gradient: those of all sizes are larger than what they are made of."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor, decay: Tensor, lag: int) -> Float[Tensor, "*b c c"]:
        # minus infinity, times the 0 of a sum that does not contain it, would be no number
        decay = decay.clamp(min=-total_decay(decay.dtype))
        ctx.save_for_backward(rows, columns, decay)
        ctx.lag = lag
        length = rows.shape[-2]
        pairs = rows.new_zeros(*rows.shape[:-1], length)
        if not lag:
            pairs.diagonal(dim1=-2, dim2=-1).copy_((rows * columns).sum(-1))
        size = 1
        while size < length:
            halves = _take_halves(rows, columns, decay, size, lag)
            products = (halves.rows * halves.to_rows) @ (halves.columns * halves.from_columns).mT
            _lower_blocks(pairs, size).copy_(products)
            size *= 2
        return pairs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dpairs: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns, decay = ctx.saved_tensors
        lag = ctx.lag
        length = rows.shape[-2]
        if lag:
            drows = torch.zeros_like(rows)
            dcolumns = torch.zeros_like(columns)
        else:
            diagonal = dpairs.diagonal(dim1=-2, dim2=-1)[..., None]
            drows = diagonal * columns
            dcolumns = diagonal * rows
        ddecay = torch.zeros_like(decay)
        size = 1
        while size < length:
            halves = _take_halves(rows, columns, decay, size, lag)
            dproducts = _lower_blocks(dpairs, size)
            drow_part = (dproducts @ (halves.columns * halves.from_columns)).mul_(halves.to_rows)
            dcolumn_part = (dproducts.mT @ (halves.rows * halves.to_rows)).mul_(halves.from_columns)
            _halves(drows, size)[1].add_(drow_part)
            _halves(dcolumns, size)[0].add_(dcolumn_part)
            # each decay is in the sums of the rows from it on, and of the columns before it
            dto_rows = sum_along_tokens(drow_part.mul_(halves.rows), reverse=True)
            dfrom_columns = sum_along_tokens(dcolumn_part.mul_(halves.columns))
            earlier, later = _halves(ddecay, size)
            if lag:
                later[..., :-1, :].add_(dto_rows[..., 1:, :])
            else:
                later.add_(dto_rows)
            earlier[..., 1:, :].add_(dfrom_columns[..., :-1, :])
            size *= 2
        return drows, dcolumns, ddecay, None


def _lower_blocks(pairs: Float[Tensor, "*b c c"], size: int) -> Float[Tensor, "*b n m m"]:
    """A view of the pairs of second halves with first ones, in the blocks on the diagonal."""
    blocks = pairs.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))  # type: ignore[no-untyped-call]
    lower: Tensor = blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return lower
