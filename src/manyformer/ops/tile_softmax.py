"""Softmax of blocks of queries over blocks of keys, weights and gradients written out in memory that stays in caches.

On a CPU, small products of matrices with reused memory in between are faster than torch's fused kernel wherever blocks
are small, and small blocks waste less on what a mask hides.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.ops.scratch_buffer import ScratchBuffer

KEPT = 1 << 24
"""Up to so many weights, 64 MB, are kept for the gradient instead of being computed once more."""


class TileCall(NamedTuple):
    """Queries, keys and values of some rows of blocks; `bias` is added to scores, `blind` queries see no key.

    `short` are rows that see only so many of the first keys.
    """

    q: Float[Tensor, "n c e"]
    k: Float[Tensor, "n s e"]
    v: Float[Tensor, "n s f"]
    bias: Float[Tensor, "#n c s"] | None
    blind: Bool[Tensor, "#n c"] | None
    short: tuple[tuple[slice, int], ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, queries and keys."""
        return self.q.shape[0], self.q.shape[1], self.k.shape[1]


def weights(call: TileCall, scale: float, scores: Float[Tensor, "n c s"], into: Float[Tensor, "n c s"]) -> None:
    """Write the scores, and their softmax, which may take their place; blind queries have no weights."""
    if call.bias is None:
        torch.baddbmm(scores, call.q, call.k.mT, beta=0, alpha=scale, out=scores)
    else:
        torch.baddbmm(call.bias, call.q, call.k.mT, alpha=scale, out=scores)
    for rows, seen in call.short:
        scores[rows, :, seen:] = -torch.inf
    torch.softmax(scores, -1, out=into)
    if call.blind is not None:
        into.masked_fill_(call.blind[..., None], 0.0)


def recompute_weights(call: TileCall, scale: float, scratch: ScratchBuffer) -> Float[Tensor, "n c s"]:
    """The weights once more; they hold until the next call."""
    found = scratch("weights", *call.shape)
    weights(call, scale, found, found)
    return found


def sums(call: TileCall, scores: Float[Tensor, "n c s"], found: Float[Tensor, "n c s"]) -> Float[Tensor, "n c"]:
    """Log-sum-exps of the scores: the largest score less the logarithm of its weight."""
    lse = scores.amax(-1) - found.amax(-1).log()
    return lse if call.blind is None else lse.masked_fill_(call.blind, -torch.inf)


class OutputGradient(NamedTuple):
    """The gradient of the outputs, and its product with the outputs over all keys.

    Both times the share that these keys have in a query's weights over all of its keys.
    """

    up: Float[Tensor, "n c f"]
    slope: Float[Tensor, "n c 1"]


def inner_gradient(
    call: TileCall, found: Float[Tensor, "n c s"], above: OutputGradient, scratch: ScratchBuffer
) -> Float[Tensor, "n c s"]:
    """The gradient of the scaled scores; it holds until the next call."""
    inner = torch.bmm(above.up, call.v.mT, out=scratch("scores", *call.shape))
    return inner.sub_(above.slope).mul_(found)


def gradients(
    call: TileCall,
    found: Float[Tensor, "n c s"],
    above: OutputGradient,
    scratch: ScratchBuffer,
    scale: float,
    into: Sequence[Tensor],
) -> None:
    """Write the gradients of queries, keys and values."""
    inner = inner_gradient(call, found, above, scratch)
    to_q, to_k, to_v = into
    torch.baddbmm(to_q, inner, call.k, beta=0, alpha=scale, out=to_q)
    torch.baddbmm(to_k, inner.mT, call.q, beta=0, alpha=scale, out=to_k)
    torch.bmm(found.mT, above.up, out=to_v)
