"""Operations of RWKV's layers with gradients in few passes over memory: mixtures of tokens, and squared ReLU."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyformer.nn.ops.cpu_caches import block_elements


def mix_tokens(
    x: Float[Tensor, "b l d"], other: Float[Tensor, "b l d"], shares: Float[Tensor, "n d"]
) -> Sequence[Float[Tensor, "b l d"]]:
    """x + share * (other - x) for each of the n vectors of shares."""
    mixtures: Sequence[Tensor] = _MixTokens.apply(x, other, shares)  # type: ignore[no-untyped-call]
    return mixtures


class _MixTokens(torch.autograd.Function):
    """Saves the differences alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
        difference = other - x
        ctx.save_for_backward(difference, shares)
        return tuple(torch.addcmul(x, difference, share) for share in shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dmixtures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        difference, shares = ctx.saved_tensors
        dx = torch.zeros_like(difference)
        dother = torch.zeros_like(difference)
        dshares = torch.zeros_like(shares)
        # x + s (o - x) has the slopes 1 - s and s
        rests = 1 - shares
        width = shares.shape[1]
        # all tensors of a block are read while they are in the caches, instead of one after another for each mixture
        tensors = (difference, dx, dother, *dmixtures)
        rows = max(1, block_elements(difference) // width)
        for block, block_dx, block_dother, *dblocks in zip(*(x.reshape(-1, width).split(rows) for x in tensors)):
            for number, dblock in enumerate(dblocks):
                block_dx.addcmul_(dblock, rests[number])
                block_dother.addcmul_(dblock, shares[number])
                dshares[number] += (dblock * block).sum(0)
        return dx, dother, dshares


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, Primer, arXiv:2109.08668, section 3)."""
    y: Tensor = _SquaredReLU.apply(x)  # type: ignore[no-untyped-call]
    return y


class _SquaredReLU(torch.autograd.Function):
    """Saves relu(x), which is half of the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rectified = x.relu()
        ctx.save_for_backward(rectified)
        return rectified * rectified

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (rectified,) = ctx.saved_tensors
        dx: Tensor = (rectified * dy).mul_(2)
        return dx
