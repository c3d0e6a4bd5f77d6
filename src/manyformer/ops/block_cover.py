"""Which blocks of keys each block of queries can see, from the mask's own bounds and never from all pairs."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.masks import Mask
from manyformer.masks.bounds import TokenBounds
from manyformer.masks.mask import part_of, role_of, take_tokens

COARSENING = 8
"""Blocks are looked at in groups of this many first, and those in groups, so that empty areas cost nothing."""


MAX_RUNS = 2
"""So many calls on views are better than one for which keys are gathered."""

MAX_PADDING_SHARE = 1 / 8
"""Rows that see fewer blocks share a call where what fills them up is no more than this share of it."""


class BlockOrder(NamedTuple):
    """Tokens cut into blocks: `blocks` names the token in each place, the first `real` of them, then repetitions."""

    blocks: Int[Tensor, "n c"]
    real: int
    is_identity: bool

    @property
    def size(self) -> int:
        """Tokens in a block."""
        return self.blocks.shape[1]

    @property
    def tokens(self) -> Int[Tensor, " t"]:
        """The real tokens in their order."""
        return self.blocks.flatten()[: self.real]

    @property
    def in_place(self) -> bool:
        """Whether cutting the tokens into these blocks is only a view."""
        return self.is_identity and self.real == self.blocks.numel()


class BlockCover(NamedTuple):
    """Pairs of blocks among which something may be visible, row by row; `full` where everything must be."""

    rows: Int[Tensor, " p"]
    columns: Int[Tensor, " p"]
    full: Bool[Tensor, " p"]


class BlockRowGroup(NamedTuple):
    """Rows of blocks that share a call, all or none of which need an inner mask.

    `shorter_rows` tells how many blocks are seen by the rows that see fewer than others; the last one fills them up.
    """

    rows: Int[Tensor, " n"]
    columns: Int[Tensor, "n m"]
    step: int | None
    needs_inner_mask: bool
    shorter_rows: tuple[tuple[int, int], ...] = ()

    @property
    def gathers(self) -> bool:
        """Whether rows see all of blocks that are not neighbours."""
        return self.step is None and not self.needs_inner_mask


def order_into_blocks(
    positions: TokenPositions, chosen: Bool[Tensor, " l"] | None, period: int | None, size: int
) -> BlockOrder:
    """The chosen tokens, or all, in blocks; sorted by document and by position modulo `period` where that is given."""
    length = positions.position_ids.shape[0]
    tokens = torch.arange(length) if chosen is None else chosen.nonzero()[:, 0]
    if period is not None:
        tokens = tokens[positions.position_ids[tokens].argsort(stable=True)]
        tokens = tokens[(positions.position_ids[tokens] % period).argsort(stable=True)]
        tokens = tokens[positions.segment_ids[tokens].argsort(stable=True)]
    count = len(tokens)
    size = max(min(size, count), 1)
    index = torch.cat([tokens, tokens[-1:].expand(-count % size)]).view(-1, size)
    return BlockOrder(index, count, is_identity=period is None and count == length)


def span_of(positions: TokenPositions, index: Int[Tensor, "*n c"], periods: frozenset[int]) -> TokenBounds:
    """What is known of each block."""
    pos, seg, role, part = (
        field[index]
        for field in (positions.position_ids, positions.segment_ids, role_of(positions), part_of(positions))
    )
    rests = {period: _ends(pos % period) for period in periods}
    return TokenBounds(*_ends(pos), _ends(seg), _ends(role), _ends(part), rests)


def cover_blocks(mask: Mask, q: TokenBounds, k: TokenBounds) -> BlockCover:
    """All pairs of blocks that `mask` does not rule out, found from coarse to fine; linear in what is found."""
    levels = [(q, k)]
    while max(len(q.first), len(k.first)) > COARSENING:
        q, k = _coarser(q), _coarser(k)
        levels.append((q, k))
    rows, columns = (axis.flatten() for axis in torch.meshgrid(_count(q), _count(k), indexing="ij"))
    for number, (q, k) in enumerate(reversed(levels)):
        if number:
            rows, columns = _children(rows, columns, len(q.first), len(k.first))
        may = mask.bounds(q.at(rows), k.at(columns)).any_visible
        rows, columns = rows[may], columns[may]
    order = (rows * len(k.first) + columns).argsort()
    rows, columns = rows[order], columns[order]
    return BlockCover(rows, columns, mask.bounds(q.at(rows), k.at(columns)).all_visible)


def group_rows(found: BlockCover, rows: int) -> list[BlockRowGroup]:
    """All rows of a cover that see anything, by what they can share."""
    same = list(_alike(found, rows))
    apart = sorted((group for group in same if group.gathers), key=lambda group: -group.columns.shape[1])
    made = [group for group in same if not group.gathers]
    while apart:
        joined, apart = _joined(apart)
        made.append(joined)
    return made


def _alike(found: BlockCover, rows: int) -> Iterator[BlockRowGroup]:
    """Rows that see equally many blocks."""
    kinds = _kinds(found, rows)
    for kind in sorted(set(kinds.tolist())):
        if kind < 2:
            continue
        some = (kinds == kind).nonzero()[:, 0]
        columns = found.columns[torch.isin(found.rows, some)].view(len(some), kind // 2)
        runs = _runs(some, columns)
        if runs and all(step is not None for _, _, step in runs):
            yield from (BlockRowGroup(*run, kind % 2 == 1) for run in runs)
        else:
            yield BlockRowGroup(some, columns, _step(some, columns), kind % 2 == 1)


def _joined(apart: list[BlockRowGroup]) -> tuple[BlockRowGroup, list[BlockRowGroup]]:
    """The first group with those that can be filled up to it, and the others; those that see most come first."""
    wide, filled = apart[0].columns.shape[1], 0
    for number, group in enumerate(apart):
        filled += len(group.rows) * (wide - group.columns.shape[1])
        if filled > MAX_PADDING_SHARE * sum(other.columns.numel() for other in apart[: number + 1]):
            return _filled(apart[:number]), apart[number:]
    return _filled(apart), []


def _filled(some: list[BlockRowGroup]) -> BlockRowGroup:
    """One group of all rows, in their order."""
    if len(some) == 1:
        return some[0]
    wide, rows = some[0].columns.shape[1], torch.cat([group.rows for group in some])
    seen = torch.cat([torch.full_like(group.rows, group.columns.shape[1]) for group in some])
    columns = [F.pad(group.columns[None], [0, wide - group.columns.shape[1]], mode="replicate")[0] for group in some]
    order = rows.argsort()
    rows, seen, every = rows[order], seen[order], torch.cat(columns)[order]
    short = tuple((int(row), int(seen[row])) for row in (seen < wide).nonzero()[:, 0])
    return BlockRowGroup(rows, every, None, needs_inner_mask=False, shorter_rows=short)


def _runs(rows: Tensor, columns: Tensor) -> list[tuple[Tensor, Tensor, int | None]]:
    """Rows in a row, such as those at the beginning and those at the end that see as much; none where they are many."""
    cuts = (rows.diff() != 1).nonzero()[:, 0] + 1
    if len(cuts) >= MAX_RUNS:
        return []
    parts = zip(rows.tensor_split(cuts), columns.tensor_split(cuts))
    return [(some, theirs, _step(some, theirs)) for some, theirs in parts]


def reachable_tokens(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions
) -> tuple[Bool[Tensor, " l"], Bool[Tensor, " s"]]:
    """Which queries may see some key, and which keys some query may see, each token judged by itself."""
    periods = mask.periods
    q, k = (
        span_of(place, torch.arange(place.position_ids.shape[0])[:, None], periods)
        for place in (query_positions, key_positions)
    )
    all_q, all_k = (
        span_of(place, torch.arange(place.position_ids.shape[0])[None], periods)
        for place in (query_positions, key_positions)
    )
    return mask.bounds(q, all_k).any_visible, mask.bounds(all_q, k).any_visible


def visible(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, q: Tensor, k: Tensor
) -> Bool[Tensor, "n c s"]:
    """The mask itself for some rows of blocks: queries (n, c) and keys (n, s), own segments only."""
    head = torch.zeros((), dtype=torch.long)
    query_positions, key_positions = (
        take_tokens(query_positions, q[:, :, None]),
        take_tokens(key_positions, k[:, None, :]),
    )
    return (
        mask(head, query_positions, key_positions) & (query_positions.segment_ids == key_positions.segment_ids)
    ).expand(*q.shape, k.shape[1])


def _ends(values: Int[Tensor, "*n c"]) -> tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]:
    low, high = values.aminmax(dim=-1)
    return low, high


def _coarser(span: TokenBounds) -> TokenBounds:
    """Groups of `COARSENING` blocks as one each."""

    def group(bound: Tensor) -> Tensor:
        return torch.cat([bound, bound[-1:].expand(-len(bound) % COARSENING)]).view(-1, COARSENING)

    def ends(bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return group(bounds[0]).amin(-1), group(bounds[1]).amax(-1)

    rests = {period: ends(bounds) for period, bounds in span.rests.items()}
    return TokenBounds(*ends((span.first, span.last)), ends(span.seg), ends(span.role), ends(span.part), rests)


def _children(rows: Tensor, columns: Tensor, most: int, widest: int) -> tuple[Tensor, Tensor]:
    step = torch.arange(COARSENING)
    row = (rows[:, None, None] * COARSENING + step[:, None]).expand(-1, COARSENING, COARSENING).flatten()
    column = (columns[:, None, None] * COARSENING + step).expand(-1, COARSENING, COARSENING).flatten()
    inside = (row < most) & (column < widest)
    return row[inside], column[inside]


def _count(span: TokenBounds) -> Int[Tensor, " n"]:
    return torch.arange(len(span.first))


def _kinds(found: BlockCover, rows: int) -> Int[Tensor, " n"]:
    """A number for each row of blocks: those with the same can share a call."""
    counts = torch.bincount(found.rows, minlength=rows)
    partial = torch.bincount(found.rows[~found.full], minlength=rows) > 0
    return 2 * counts + partial


def _step(rows: Tensor, columns: Tensor) -> int | None:
    """By how many blocks the keys move from one row to the next, where rows and keys are contiguous."""
    across = torch.arange(columns.shape[1])
    if not ((rows - rows[0] == torch.arange(len(rows))).all() and (columns - columns[:, :1] == across).all()):
        return None
    for step in (1, 0):
        if (columns[:, 0] - columns[0, 0] == step * (rows - rows[0])).all():
            return step
    return None
