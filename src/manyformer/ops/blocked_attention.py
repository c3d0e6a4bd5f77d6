"""Softmax attention computed one block of queries at a time: any mask and position, memory linear in length."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.costs import COSTS
from manyformer.masks import Mask
from manyformer.ops.softmax_attention import softmax_attention_reference
from manyformer.position import Position
from manyformer.recompute import recompute_for_gradient

BLOCK = COSTS.pairwise_block


def blocked_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    mask: Mask,
    *,
    scale: float,
    position: Position,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    visible_key_count: Callable[[int], int],
    dropout: float = 0.0,
) -> Float[Tensor, "b h l f"]:
    """`softmax_attention_reference` for each block; scores and weights are recomputed for the gradient, block by block.

    `visible_key_count(end)` returns how many leading keys the queries before `end` may attend to.
    """

    def block(q: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
        block_queries = query_positions.columns(begin, begin + q.shape[2])
        block_keys = key_positions.columns(0, k.shape[2])
        y, _ = softmax_attention_reference(
            q,
            k,
            v,
            mask.dense(block_queries, block_keys, q.shape[1]),
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
        parts.append(recompute_for_gradient(block, *rows, begin, dropout=dropout))
    return torch.cat(parts, dim=2)
