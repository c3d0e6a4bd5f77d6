"""Position encodings that every layer learns separately (Al-Rfou et al. 2019, arXiv:1808.04444)."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, Context, Layer, LayerOutput, State, TokenPositions
from manyformer.head_selection import HeadSelection, PerHeadTensors, head_channels, select_entries
from manyformer.position.absolute import LearnedPosition
from manyformer.position.position import Position


@final
class PositionLayer(Layer):
    """A layer that adds a position to the residual stream at its place in the stack, not only to the embeddings.

    Before each layer of a stack, each with its own `LearnedPosition`, it is the positional embedding per layer of
    Al-Rfou et al. 2019: attention and feed-forward both read it, and it stays in the residual stream."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        if attention_seams := position.required_seams() - {"embed"}:
            raise ValueError(
                f"PositionLayer: {type(position).__name__} acts on {sorted(attention_seams)} inside attention, "
                "not on the residual stream"
            )
        self.position = position

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        return LayerOutput(self.position.embed(x, ctx.positions), state)


@final
class LearnedQKPosition(Position, PerHeadTensors):
    """A learned vector per position added to queries, and another added to keys; the residual stream is unchanged.

    The second meaning of positions per layer: P W_q and P W_k for a table P added to the inputs of the query and key
    projections, each product learned as one table. Values, feed-forward layers and memories of hidden states do not
    depend on it.
    """

    def __init__(
        self, heads: int, width: int, max_length: int, *, kv_heads: int | None = None, std: float = 0.02
    ) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"LearnedQKPosition: max_length ({max_length}) must be at least 1 position")
        self.max_length = max_length
        self.queries = LearnedPosition(heads * width, max_length, std=std)
        self.keys = LearnedPosition((heads if kv_heads is None else kv_heads) * width, max_length, std=std)

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        return _add_per_head(q, self.queries, positions)

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        return _add_per_head(k, self.keys, positions)

    def keep_heads(self, selection: HeadSelection) -> None:
        tables = (self.queries, selection.heads, selection.total), (self.keys, selection.kv_heads, selection.kv_total)
        for table, heads, total in tables:
            select_entries(table, "weight", head_channels(heads, table.weight.shape[1] // total), 1)


def _add_per_head(
    x: Float[Tensor, "b h l e"], table: LearnedPosition, positions: TokenPositions
) -> Float[Tensor, "b h l e"]:
    rows = table.rows(torch.where(positions.segment_ids == PADDING_SEGMENT, 0, positions.position_ids))
    return x + rows.view(*rows.shape[:2], x.shape[1], x.shape[3]).transpose(1, 2)
