"""Softmax attention over the visible blocks of a mask, with any position.

The blocks of a plan are gathered and computed, a few at a time, and recomputed for the gradient. Scores, weights and
values are formed as in the definition, so that a position may modify any of them; work and memory are linear in the
visible blocks. Parts of a plan are merged by their log-sum-exps.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.nn.core import TokenPositions, tree_map
from manyformer.nn.masks.mask import Mask, take_tokens
from manyformer.nn.ops.softmax_attention import masked_softmax
from manyformer.nn.positions.position import Position
from manyformer.nn.runtime.dropout import drop
from manyformer.nn.runtime.recompute import recompute_for_gradient
from manyformer.nn.softmax.sparse_plan import BlockTiles, HeadGroup, MaskPart, SparsePlan

SCORES_PER_PIECE = 1 << 22
"""Scores of a position that are computed at a time in visible blocks."""


class PairScoring(NamedTuple):
    """What acts on the scores of pairs; `mask` is applied per head where heads have different masks."""

    position: Position
    query_positions: TokenPositions
    key_positions: TokenPositions
    mask: Mask | None
    scale: float
    dropout: float


def tiled_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    plan: SparsePlan,
    scoring: PairScoring,
) -> Float[Tensor, "b h l f"]:
    """Outputs over the pairs in `plan`, which all heads share; a query that sees no key gets zeros."""
    if len(plan.rows) == 1:
        return _row_attention(q, k, v, plan.rows[0], scoring)
    rows = []
    for number in range(q.shape[0]):
        row = slice(number, number + 1)
        query_positions, key_positions = (
            take_tokens(positions, slice(None) if len(positions.position_ids) == 1 else row)
            for positions in (scoring.query_positions, scoring.key_positions)
        )
        row_scoring = scoring._replace(query_positions=query_positions, key_positions=key_positions)
        rows.append(_row_attention(q[row], k[row], v[row], plan.rows[number], row_scoring))
    return torch.cat(rows)


def _row_attention(
    q: Tensor, k: Tensor, v: Tensor, groups: tuple[HeadGroup, ...], scoring: PairScoring
) -> Float[Tensor, "b h l f"]:
    part_results = [_part_attention(q, k, v, part, scoring) for group in groups for part in group.parts]
    if not part_results:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    if len(part_results) == 1:
        return part_results[0][0]
    sums = torch.stack([lse for _, lse in part_results])
    # -inf minus -inf where no key is visible
    total_lse = sums.masked_fill((sums == -torch.inf).all(0), 0.0).logsumexp(0)
    y = torch.zeros_like(part_results[0][0])
    for part_y, lse in part_results:
        y = y + part_y * (lse - total_lse).exp()[..., None].to(part_y.dtype)
    return y


def _part_attention(q: Tensor, k: Tensor, v: Tensor, part: MaskPart, scoring: PairScoring) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of all queries; 0 and -inf for queries outside the part."""
    results = [
        recompute_for_gradient(_block_attention, q, k, v, piece, part, scoring, dropout=scoring.dropout)
        for tiles in part.tiles
        for piece in _split_tiles(tiles, part, q.shape[0] * q.shape[1])
    ]
    rows = torch.cat([tiles.rows for tiles in part.tiles])
    # the last block is padded by repeating its last token
    slots = (rows[:, None] * part.q.size + torch.arange(part.q.size, device="cpu")).flatten()
    # which slots are tokens is known on the host: a plan is never read from a device
    valid = (slots < part.q.num_tokens).nonzero()[:, 0]
    tokens = part.q.blocks.flatten()[slots[valid]].to(q.device)
    y, lse = (torch.cat(pieces, 2).index_select(2, valid.to(q.device)) for pieces in zip(*results))
    # index_copy, not assignment: it has a gradient, and queries of a part are distinct
    empty = q.new_zeros(*q.shape[:3], v.shape[-1]), lse.new_full(q.shape[:3], -torch.inf)
    return empty[0].index_copy(2, tokens, y), empty[1].index_copy(2, tokens, lse)


def _block_attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: BlockTiles, part: MaskPart, scoring: PairScoring
) -> tuple[Float[Tensor, "b h t f"], Float[Tensor, "b h t"]]:
    """Outputs and log-sum-exps of some rows of blocks."""
    query_index = part.q.blocks[tiles.rows]
    key_index = part.k.blocks[tiles.columns].flatten(1)
    rows, keys, values = (_gather_blocks(x, index) for x, index in ((q, query_index), (k, key_index), (v, key_index)))
    query_positions = _gather_positions(scoring.query_positions, query_index, q.shape[0])
    key_positions = _gather_positions(scoring.key_positions, key_index, q.shape[0])
    logits = scoring.position.score(rows @ keys.mT * scoring.scale, rows, keys, query_positions, key_positions)
    visible = torch.ones((), dtype=torch.bool, device=q.device)
    if tiles.inner is not None:
        inner = tiles.inner.to(q.device).expand(len(query_index), -1, -1)
        visible = inner.expand(q.shape[0], *inner.shape).flatten(0, 1)[:, None]
    if tiles.shorter_rows:
        visible = visible & _valid_keys(tiles, part.k.size).to(q.device).repeat(q.shape[0], 1)[:, None, None]
    # the plan shows what any head sees
    if scoring.mask is not None:
        visible = visible & scoring.mask.dense(query_positions, key_positions, q.shape[1])
    visible = visible.expand(logits.shape)
    weights = masked_softmax(logits, visible)
    has_key = visible.any(-1)
    masked_logits = logits.to(weights.dtype).masked_fill(~visible, -torch.inf).masked_fill(~has_key[..., None], 0.0)
    lse = masked_logits.logsumexp(-1).masked_fill(~has_key, -torch.inf)
    dropped = drop(weights.to(values.dtype), scoring.dropout)
    y = scoring.position.value(dropped @ values, dropped, query_positions, key_positions)
    return _to_sequences(y, q.shape[0]), _to_sequences(lse, q.shape[0])


def _valid_keys(tiles: BlockTiles, size: int) -> Bool[Tensor, "n s"]:
    """Mask of the keys that are not padding of rows with fewer key blocks."""
    num_columns = torch.full((len(tiles.rows), 1), tiles.columns.shape[1], device="cpu")
    for row, count in tiles.shorter_rows:
        num_columns[row] = count
    return (torch.arange(tiles.columns.shape[1], device="cpu") < num_columns).repeat_interleave(size, 1)


def _gather_blocks(x: Float[Tensor, "b h l e"], index: Tensor) -> Float[Tensor, "n h c e"]:
    """The tokens of each row of blocks, with rows of all sequences on the batch axis."""
    picked = x.index_select(2, index.flatten().to(x.device))
    return picked.view(*x.shape[:2], *index.shape, x.shape[-1]).transpose(1, 2).flatten(0, 1)


def _to_sequences(x: Float[Tensor, "n h c *f"], batch: int) -> Float[Tensor, "b h t *f"]:
    """The inverse layout: the rows of a sequence concatenated."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2).flatten(2, 3)


def _gather_positions(positions: TokenPositions, index: Tensor, batch: int) -> TokenPositions:
    """Positions of gathered tokens, (n, c)."""
    gathered = take_tokens(positions, (slice(None), index.to(positions.position_ids.device)))
    return tree_map(lambda x: x.expand(batch, *x.shape[1:]).flatten(0, 1), gathered)  # type: ignore[no-any-return]


def _split_tiles(tiles: BlockTiles, part: MaskPart, heads: int) -> Iterator[BlockTiles]:
    """Split tiles into pieces of about `SCORES_PER_PIECE` scores."""
    scores_per_row = heads * part.q.size * tiles.columns.shape[1] * part.k.size
    chunk = max(SCORES_PER_PIECE // max(scores_per_row, 1), 1)
    for begin in range(0, len(tiles.rows), chunk):
        piece_rows = slice(begin, begin + chunk)
        if tiles.inner is None or len(tiles.inner) == 1:
            inner = tiles.inner
        else:
            inner = tiles.inner[piece_rows]
        shorter_rows = tuple(
            (row - begin, num_columns) for row, num_columns in tiles.shorter_rows if begin <= row < begin + chunk
        )
        yield BlockTiles(
            tiles.rows[piece_rows], tiles.columns[piece_rows], None, inner, None, shorter_rows, rows_adjacent=False
        )
