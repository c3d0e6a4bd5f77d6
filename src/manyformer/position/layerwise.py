"""Positions that every layer learns for itself (Al-Rfou et al. 2019, arXiv:1808.04444)."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, Context, Layer, LayerOutput, State, TokenPositions
from manyformer.position.absolute import LearnedPosition
from manyformer.position.position import Position


@final
class PositionLayer(Layer):
    """A position added to the residual stream wherever this layer stands, not only to the embeddings.

    Before each layer of a stack, with a `LearnedPosition` of its own, it is the positional embedding per layer of
    Al-Rfou et al. 2019: attention and feed-forward both see it, and it stays on the stream."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        if inside := position.required_seams() - {"embed"}:
            raise ValueError(
                f"PositionLayer: {type(position).__name__} acts on {sorted(inside)} inside attention, not on a stream"
            )
        self.position = position

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        return LayerOutput(self.position.embed(x, ctx.positions), state)


@final
class LearnedQKPosition(Position):
    """A learned vector for each position added to queries, and another to keys: order without a trace in the stream.

    The other thing that goes by the name of positions per layer: P W_q and P W_k for a table P that is added to what
    attention reads queries and keys from, each product learnt as a whole. Values, feed-forward layers and memories of
    hidden states never see it.
    """

    def __init__(
        self, heads: int, width: int, max_length: int, *, kv_heads: int | None = None, std: float = 0.02
    ) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"LearnedQKPosition: longest ({max_length}) must be at least 1 position")
        self.max_length = max_length
        self.queries = LearnedPosition(heads * width, max_length, std=std)
        self.keys = LearnedPosition((heads if kv_heads is None else kv_heads) * width, max_length, std=std)

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        return _add(q, self.queries, positions)

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        return _add(k, self.keys, positions)


def _add(x: Float[Tensor, "b h l e"], table: LearnedPosition, positions: TokenPositions) -> Float[Tensor, "b h l e"]:
    rows = table.rows(torch.where(positions.segment_ids == PADDING_SEGMENT, 0, positions.position_ids))
    return x + rows.view(*rows.shape[:2], x.shape[1], x.shape[3]).transpose(1, 2)
