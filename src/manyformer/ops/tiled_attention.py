"""Softmax attention with any position over what a mask shows and nothing else.

The blocks of a plan are gathered and written out, some at a time, and made anew for the gradient. Scores, weights and
values are formed as in the definition, so a position may act on them as it likes; work and memory are linear in what is
visible. Parts of a plan are merged by their log-sum-exps.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyformer.core import TokenPositions, tree_map
from manyformer.dropout import drop
from manyformer.masks import Mask
from manyformer.masks.mask import take_tokens
from manyformer.ops.softmax_attention import weights_of
from manyformer.ops.sparse_plan import BlockTiles, HeadGroup, MaskPart, SparsePlan
from manyformer.position import Position

AT_ONCE = 1 << 22
"""So many scores are written out at a time."""


class PositionSeams(NamedTuple):
    """What makes scores and outputs of queries, keys and values; `mask` where heads see different things."""

    position: Position
    query_positions: TokenPositions
    key_positions: TokenPositions
    mask: Mask | None
    scale: float
    dropout: float


def attend(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    plan: SparsePlan,
    seams: PositionSeams,
) -> Float[Tensor, "b h l f"]:
    """Outputs over the pairs in `plan`, which all heads share; a query that sees no key gets zeros."""
    batch = q.shape[0]
    if len(plan.rows) == 1:
        return _row(q, k, v, plan.rows[0], seams)
    rows = []
    for number in range(batch):
        one = slice(number, number + 1)
        at, of = (
            take_tokens(place, slice(None) if len(place.position_ids) == 1 else one)
            for place in (seams.query_positions, seams.key_positions)
        )
        rows.append(
            _row(q[one], k[one], v[one], plan.rows[number], seams._replace(query_positions=at, key_positions=of))
        )
    return torch.cat(rows)


def _row(
    q: Tensor, k: Tensor, v: Tensor, lanes: tuple[HeadGroup, ...], seams: PositionSeams
) -> Float[Tensor, "b h l f"]:
    found = [_part(q, k, v, part, seams) for lane in lanes for part in lane.parts]
    if not found:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    if len(found) == 1:
        return found[0][0]
    sums = torch.stack([lse for _, lse in found])
    # where nothing is visible, -inf less -inf
    whole = sums.masked_fill((sums == -torch.inf).all(0), 0.0).logsumexp(0)
    y = torch.zeros_like(found[0][0])
    for one, lse in found:
        y = y + one * (lse - whole).exp()[..., None].to(one.dtype)
    return y


def _part(q: Tensor, k: Tensor, v: Tensor, part: MaskPart, seams: PositionSeams) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of all queries; 0 and -inf of those that the part is not about."""
    ys, sums = [], []
    for tiles in part.tiles:
        for piece in _pieces(tiles, part, q.shape[0] * q.shape[1]):
            y, lse = (
                _again(q, k, v, piece, part, seams) if torch.is_grad_enabled() else _blocks(q, k, v, piece, part, seams)
            )
            ys.append(y)
            sums.append(lse)
    rows = torch.cat([tiles.rows for tiles in part.tiles])
    # what fills up the last block repeats its last token
    slots = (rows[:, None] * part.q.size + torch.arange(part.q.size, device="cpu")).flatten()
    real = (slots < part.q.real).nonzero()[:, 0]
    tokens = part.q.blocks.flatten()[slots[real]].to(q.device)
    y, lse = (torch.cat(found, 2).index_select(2, real.to(q.device)) for found in (ys, sums))
    nothing = q.new_zeros(*q.shape[:3], v.shape[-1]), lse.new_full(q.shape[:3], -torch.inf)
    return nothing[0].index_copy(2, tokens, y), nothing[1].index_copy(2, tokens, lse)


def _again(
    q: Tensor, k: Tensor, v: Tensor, tiles: BlockTiles, part: MaskPart, seams: PositionSeams
) -> tuple[Tensor, Tensor]:
    """`_blocks`, of which nothing is kept for the gradient."""
    drawn = seams.dropout > 0
    return checkpoint(  # type: ignore[no-any-return]
        _blocks, q, k, v, tiles, part, seams, use_reentrant=False, preserve_rng_state=drawn
    )


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, tiles: BlockTiles, part: MaskPart, seams: PositionSeams
) -> tuple[Float[Tensor, "b h t f"], Float[Tensor, "b h t"]]:
    """Outputs and log-sum-exps of some rows of blocks."""
    mine, theirs = part.q.blocks[tiles.rows], part.k.blocks[tiles.columns].flatten(1)
    rows, keys, values = (_gathered(x, index) for x, index in ((q, mine), (k, theirs), (v, theirs)))
    at, of = (
        _places(place, index, q.shape[0])
        for place, index in ((seams.query_positions, mine), (seams.key_positions, theirs))
    )
    logits = seams.position.score(rows @ keys.mT * seams.scale, rows, keys, at, of)
    seen = torch.ones((), dtype=torch.bool, device=q.device)
    if tiles.inner is not None:
        inner = tiles.inner.to(q.device).expand(len(mine), -1, -1)
        seen = inner.expand(q.shape[0], *inner.shape).flatten(0, 1)[:, None]
    if tiles.shorter_rows:
        seen = seen & _there(tiles, part.k.size).to(q.device).repeat(q.shape[0], 1)[:, None, None]
    if seams.mask is not None:
        seen = seen & seams.mask.dense(at, of, q.shape[1])
    seen = seen.expand(logits.shape)
    weights = weights_of(logits, seen)
    some = seen.any(-1)
    wide = logits.to(weights.dtype).masked_fill(~seen, -torch.inf).masked_fill(~some[..., None], 0.0)
    lse = wide.logsumexp(-1).masked_fill(~some, -torch.inf)
    kept = drop(weights.to(values.dtype), seams.dropout)
    y = seams.position.value(kept @ values, kept, at, of)
    return _laid_out(y, q.shape[0]), _laid_out(lse, q.shape[0])


def _there(tiles: BlockTiles, size: int) -> Bool[Tensor, "n s"]:
    """Which keys are not there only to fill up rows that see fewer blocks."""
    seen = torch.full((len(tiles.rows), 1), tiles.columns.shape[1], device="cpu")
    for row, count in tiles.shorter_rows:
        seen[row] = count
    return (torch.arange(tiles.columns.shape[1], device="cpu") < seen).repeat_interleave(size, 1)


def _gathered(x: Float[Tensor, "b h l e"], index: Tensor) -> Float[Tensor, "n h c e"]:
    """The tokens of each row of blocks, all rows of all sequences below one another."""
    picked = x.index_select(2, index.flatten().to(x.device))
    return picked.view(*x.shape[:2], *index.shape, x.shape[-1]).transpose(1, 2).flatten(0, 1)


def _laid_out(x: Float[Tensor, "n h c *f"], batch: int) -> Float[Tensor, "b h t *f"]:
    """The other way round: all rows of a sequence behind one another."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2).flatten(2, 3)


def _places(positions: TokenPositions, index: Tensor, batch: int) -> TokenPositions:
    """Places of gathered tokens, (n, c)."""
    found = take_tokens(positions, (slice(None), index.to(positions.position_ids.device)))
    return tree_map(lambda x: x.expand(batch, *x.shape[1:]).flatten(0, 1), found)  # type: ignore[no-any-return]


def _pieces(tiles: BlockTiles, part: MaskPart, heads: int) -> Iterator[BlockTiles]:
    """The same in pieces of no more scores than are good at once."""
    each = heads * part.q.size * tiles.columns.shape[1] * part.k.size
    chunk = max(AT_ONCE // max(each, 1), 1)
    for begin in range(0, len(tiles.rows), chunk):
        some = slice(begin, begin + chunk)
        inner = tiles.inner if tiles.inner is None or len(tiles.inner) == 1 else tiles.inner[some]
        short = tuple((row - begin, seen) for row, seen in tiles.shorter_rows if begin <= row < begin + chunk)
        yield BlockTiles(tiles.rows[some], tiles.columns[some], None, inner, None, short, rows_adjacent=False)
