"""Softmax attention written out for a block of queries at a time: any mask and position, memory linear in length."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyformer.core import TokenPositions
from manyformer.ops.softmax_attention import naive
from manyformer.position import Position

BLOCK = 128

DenseMaskFn = Callable[[TokenPositions, TokenPositions], Bool[Tensor, "#b #h l s"]]


def blocked(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    dense: DenseMaskFn,
    *,
    scale: float,
    position: Position,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    seen: Callable[[int], int],
    dropout: float = 0.0,
) -> Float[Tensor, "b h l f"]:
    """`naive` for each block; `dense` writes a mask out, `seen(end)` is how many keys the queries before `end` see.

    Scores and weights are made anew for the gradient, so that those of one block at a time exist.
    """

    def block(q: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
        here, there = query_positions.columns(begin, begin + q.shape[2]), key_positions.columns(0, k.shape[2])
        mask = dense(here, there)
        y, _ = naive(
            q, k, v, mask, scale=scale, position=position, query_positions=here, key_positions=there, dropout=dropout
        )
        return y

    parts = []
    for begin in range(0, q.shape[2], BLOCK):
        end = min(begin + BLOCK, q.shape[2])
        keys = seen(end)
        rows = q[:, :, begin:end], k[:, :, :keys], v[:, :, :keys]
        if torch.is_grad_enabled():
            parts.append(checkpoint(block, *rows, begin, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            parts.append(block(*rows, begin))
    return torch.cat(parts, dim=2)
