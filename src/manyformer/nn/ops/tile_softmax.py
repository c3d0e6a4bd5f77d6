"""Softmax of query blocks over key blocks, with weights and gradients in reused memory that fits the CPU's caches.

On a CPU, small matrix products with reused memory in between are faster than torch's fused kernel wherever blocks are
small, and small blocks waste less on hidden pairs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.nn.runtime.device_reads import ScratchBuffer

MAX_SAVED_WEIGHTS = 1 << 24
"""Up to this many weights of tiles, 64 MB, are saved for the gradient instead of being recomputed."""


class TileCall(NamedTuple):
    """Queries, keys and values of some rows of blocks; `bias` is added to scores.

    `rows_without_keys` are queries that see no key; `shorter_rows` are rows that see only so many of the first keys.
    """

    q: Float[Tensor, "n c e"]
    k: Float[Tensor, "n s e"]
    v: Float[Tensor, "n s f"]
    bias: Float[Tensor, "#n c s"] | None
    rows_without_keys: Bool[Tensor, "#n c"] | None
    shorter_rows: tuple[tuple[slice, int], ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of rows, queries and keys."""
        return self.q.shape[0], self.q.shape[1], self.k.shape[1]


def compute_weights(call: TileCall, scale: float, scores: Float[Tensor, "n c s"], out: Float[Tensor, "n c s"]) -> None:
    """Write scores and their softmax, which may share memory; weights are 0 in `rows_without_keys`."""
    if call.bias is None:
        # with beta 0 the first argument is not read: it only gives the shape
        torch.baddbmm(scores, call.q, call.k.mT, beta=0, alpha=scale, out=scores)
    else:
        torch.baddbmm(call.bias, call.q, call.k.mT, alpha=scale, out=scores)
    for rows, num_keys in call.shorter_rows:
        # the repeated last block of a padded row would count twice
        scores[rows, :, num_keys:] = -torch.inf
    torch.softmax(scores, -1, out=out)
    if call.rows_without_keys is not None:
        out.masked_fill_(call.rows_without_keys[..., None], 0.0)


def recompute_weights(call: TileCall, scale: float, scratch: ScratchBuffer) -> Float[Tensor, "n c s"]:
    """Recompute the weights of a call; valid until the next one."""
    tile_weights = scratch("weights", *call.shape)
    compute_weights(call, scale, tile_weights, tile_weights)
    return tile_weights


def log_sum_exps(
    call: TileCall, scores: Float[Tensor, "n c s"], tile_weights: Float[Tensor, "n c s"]
) -> Float[Tensor, "n c"]:
    """Log-sum-exps of the scores: the largest score minus the logarithm of its weight."""
    # w_max = exp(s_max - lse): two reductions of what exists already, instead of another pass of exponentials
    lse = scores.amax(-1) - tile_weights.amax(-1).log()
    if call.rows_without_keys is None:
        return lse
    return lse.masked_fill_(call.rows_without_keys, -torch.inf)


class OutputGradient(NamedTuple):
    """The gradient of the outputs, and its inner product with the outputs over all keys.

    Both are multiplied by the share of these keys in the query's weights over all of its keys.
    """

    grad_y: Float[Tensor, "n c f"]
    delta: Float[Tensor, "n c 1"]


def score_gradient(
    call: TileCall, tile_weights: Float[Tensor, "n c s"], output_gradient: OutputGradient, scratch: ScratchBuffer
) -> Float[Tensor, "n c s"]:
    """The gradient of the scaled scores; valid until the next call."""
    # dS = W * (dY V^T - delta), in the memory of scores that nobody needs any more
    grad_scores = torch.bmm(output_gradient.grad_y, call.v.mT, out=scratch("scores", *call.shape))
    return grad_scores.sub_(output_gradient.delta).mul_(tile_weights)


def compute_gradients(
    call: TileCall,
    tile_weights: Float[Tensor, "n c s"],
    output_gradient: OutputGradient,
    scratch: ScratchBuffer,
    scale: float,
    out: Sequence[Tensor],
) -> None:
    """Write the gradients of queries, keys and values."""
    grad_scores = score_gradient(call, tile_weights, output_gradient, scratch)
    grad_q, grad_k, grad_v = out
    torch.baddbmm(grad_q, grad_scores, call.k, beta=0, alpha=scale, out=grad_q)
    torch.baddbmm(grad_k, grad_scores.mT, call.q, beta=0, alpha=scale, out=grad_k)
    torch.bmm(tile_weights.mT, output_gradient.grad_y, out=grad_v)
