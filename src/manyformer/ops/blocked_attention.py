"""Softmax attention computed one block of queries at a time: any mask and position, memory linear in length."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyformer.core import TokenPositions
from manyformer.costs import COSTS
from manyformer.ops.softmax_attention import softmax_attention_reference
from manyformer.position import Position

BLOCK = COSTS.pairwise_block

DenseMaskFn = Callable[[TokenPositions, TokenPositions], Bool[Tensor, "#b #h l s"]]


def blocked_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    dense_mask: DenseMaskFn,
    *,
    scale: float,
    position: Position,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    visible_key_count: Callable[[int], int],
    dropout: float = 0.0,
) -> Float[Tensor, "b h l f"]:
    """`softmax_attention_reference` for each block; scores and weights are recomputed for the gradient, block by block.

    `dense_mask` returns the boolean mask of a block, `visible_key_count(end)` how many leading keys the queries before
    `end` may attend to.
    """

    def block(q: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
        block_queries = query_positions.columns(begin, begin + q.shape[2])
        block_keys = key_positions.columns(0, k.shape[2])
        mask = dense_mask(block_queries, block_keys)
        y, _ = softmax_attention_reference(
            q,
            k,
            v,
            mask,
            scale=scale,
            position=position,
            query_positions=block_queries,
            key_positions=block_keys,
            dropout=dropout,
        )
        return y

    parts = []
    for begin in range(0, q.shape[2], BLOCK):
        end = min(begin + BLOCK, q.shape[2])
        keys = visible_key_count(end)
        rows = q[:, :, begin:end], k[:, :, :keys], v[:, :, :keys]
        if torch.is_grad_enabled():
            parts.append(checkpoint(block, *rows, begin, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            parts.append(block(*rows, begin))
    return torch.cat(parts, dim=2)
