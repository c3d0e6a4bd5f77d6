"""Which key blocks each query block can attend to, from the mask's bounds and never from all pairs."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.nn.core import TokenPositions
from manyformer.nn.masks.mask import Mask, TokenBounds, part_ids_of, roles_of, take_tokens

COARSENING = 8
"""Blocks per group of the next coarser level: a group with no visible pair is never refined."""

MAX_RUNS = 2
"""Up to this many calls on views are faster than one call on gathered keys."""

MAX_PADDING_SHARE = 1 / 8
"""Rows with fewer key blocks share a call while padding is at most this share of its key blocks."""


class BlockOrder(NamedTuple):
    """Tokens split into blocks: `blocks` holds `num_tokens` token indices, padded by repeating the last one."""

    blocks: Int[Tensor, "n c"]
    num_tokens: int
    is_identity: bool

    @property
    def size(self) -> int:
        """Tokens per block."""
        return self.blocks.shape[1]

    @property
    def tokens(self) -> Int[Tensor, " t"]:
        """The token indices without padding, in order."""
        return self.blocks.flatten()[: self.num_tokens]

    @property
    def is_view(self) -> bool:
        """Whether splitting the tokens into these blocks is only a view."""
        return self.is_identity and self.num_tokens == self.blocks.numel()


class BlockCover(NamedTuple):
    """Block pairs that may hold a visible pair, row by row; `full` where all their pairs are visible."""

    rows: Int[Tensor, " p"]
    columns: Int[Tensor, " p"]
    full: Bool[Tensor, " p"]


class BlockRowGroup(NamedTuple):
    """Rows of blocks computed in one call; all or none of them need an inner mask.

    `shorter_rows` are pairs of a row and its number of key blocks where it has fewer than `columns` is wide; its last
    block is then repeated. `step` is by how many blocks the keys move per row, None where they must be gathered.
    """

    rows: Int[Tensor, " n"]
    columns: Int[Tensor, "n m"]
    step: int | None
    needs_inner_mask: bool
    shorter_rows: tuple[tuple[int, int], ...] = ()

    @property
    def needs_gather(self) -> bool:
        """Whether full blocks must be gathered because they are not adjacent."""
        return self.step is None and not self.needs_inner_mask


def order_into_blocks(
    positions: TokenPositions, chosen: Bool[Tensor, " l"] | None, period: int | None, size: int
) -> BlockOrder:
    """Split the chosen tokens, or all, into blocks; with `period`, sorted by document and position modulo `period`."""
    length = positions.position_ids.shape[0]
    if chosen is None:
        tokens = torch.arange(length)
    else:
        tokens = chosen.nonzero()[:, 0]
    if period is not None:
        # stable sorts from the least to the most significant key: document, then residue, then position
        tokens = tokens[positions.position_ids[tokens].argsort(stable=True)]
        tokens = tokens[(positions.position_ids[tokens] % period).argsort(stable=True)]
        tokens = tokens[positions.segment_ids[tokens].argsort(stable=True)]
    count = len(tokens)
    # fewer tokens than a block are one block of their own size, not a padded one
    size = max(min(size, count), 1)
    index = torch.cat([tokens, tokens[-1:].expand(-count % size)]).view(-1, size)
    return BlockOrder(index, count, is_identity=period is None and count == length)


def block_bounds(positions: TokenPositions, index: Int[Tensor, "n c"], periods: frozenset[int]) -> TokenBounds:
    """Bounds of position, segment, role and part over the tokens of each block, of one row or of each row."""
    position_ids = positions.position_ids[..., index]
    fields = (positions.segment_ids, roles_of(positions), part_ids_of(positions))
    segments, roles, parts = (_min_max(field[..., index]) for field in fields)
    rests = {period: _min_max(position_ids % period) for period in periods}
    return TokenBounds(*_min_max(position_ids), segments, roles, parts, rests)


def cover_blocks(mask: Mask, q: TokenBounds, k: TokenBounds) -> BlockCover:
    """All block pairs that `mask` does not exclude, searched from coarse to fine in time linear in their number."""
    # from fine to coarse; refined in the opposite order, where most groups are excluded at once
    levels = [(q, k)]
    while max(len(q.first), len(k.first)) > COARSENING:
        q = _coarsen(q)
        k = _coarsen(k)
        levels.append((q, k))
    rows, columns = (
        axis.flatten() for axis in torch.meshgrid(*map(torch.arange, (len(q.first), len(k.first))), indexing="ij")
    )
    for level, (q, k) in enumerate(reversed(levels)):
        if level:
            rows, columns = _children(rows, columns, len(q.first), len(k.first))
        any_visible = mask.bounds(q.select(rows), k.select(columns)).any_visible
        rows = rows[any_visible]
        columns = columns[any_visible]
    # refining leaves pairs in the order of groups; calls need them row by row
    order = (rows * len(k.first) + columns).argsort()
    rows = rows[order]
    columns = columns[order]
    return BlockCover(rows, columns, mask.bounds(q.select(rows), k.select(columns)).all_visible)


def group_rows(cover: BlockCover, rows: int) -> list[BlockRowGroup]:
    """Group the rows of a cover that have visible keys into calls."""
    groups = list(_group_by_key_count(cover, rows))
    to_gather = sorted((group for group in groups if group.needs_gather), key=lambda group: -group.columns.shape[1])
    # views need no copies, and masks are of a group's own shape: only gathered full blocks may share a padded call
    merged = [group for group in groups if not group.needs_gather]
    while to_gather:
        joined, to_gather = _merge_padded(to_gather)
        merged.append(joined)
    return merged


def _group_by_key_count(cover: BlockCover, rows: int) -> Iterator[BlockRowGroup]:
    """Groups of rows with equally many key blocks."""
    kinds = _row_kinds(cover, rows)
    for kind in sorted(set(kinds.tolist())):
        # kinds are twice the number of key blocks, plus 1 for a mask: below 2 a row has no key
        if kind < 2:
            continue
        members = (kinds == kind).nonzero()[:, 0]
        columns = cover.columns[torch.isin(cover.rows, members)].view(len(members), kind // 2)
        runs = _split_contiguous(members, columns)
        if runs and all(step is not None for _, _, step in runs):
            yield from (BlockRowGroup(*run, kind % 2 == 1) for run in runs)
        else:
            yield BlockRowGroup(members, columns, _row_step(members, columns), kind % 2 == 1)


def _merge_padded(groups: list[BlockRowGroup]) -> tuple[BlockRowGroup, list[BlockRowGroup]]:
    """Merge the leading groups into one, padding rows to the widest, while padding stays below `MAX_PADDING_SHARE`.

    `groups` are sorted by their number of key blocks, descending. Returns the merged group and the remaining ones.
    """
    widest = groups[0].columns.shape[1]
    padding = 0
    for count, group in enumerate(groups):
        padding += len(group.rows) * (widest - group.columns.shape[1])
        if padding > MAX_PADDING_SHARE * sum(merged.columns.numel() for merged in groups[: count + 1]):
            return _pad_and_concatenate(groups[:count]), groups[count:]
    return _pad_and_concatenate(groups), []


def _pad_and_concatenate(groups: list[BlockRowGroup]) -> BlockRowGroup:
    """Concatenate groups into one, with rows in order and their key blocks padded to the widest group."""
    if len(groups) == 1:
        return groups[0]
    widest = groups[0].columns.shape[1]
    rows = torch.cat([group.rows for group in groups])
    widths = torch.cat([torch.full_like(group.rows, group.columns.shape[1]) for group in groups])
    padding = [[0, widest - group.columns.shape[1]] for group in groups]
    columns = [F.pad(group.columns[None], pad, mode="replicate")[0] for group, pad in zip(groups, padding)]
    order = rows.argsort()
    rows = rows[order]
    widths = widths[order]
    padded = torch.cat(columns)[order]
    shorter_rows = tuple((int(row), int(widths[row])) for row in (widths < widest).nonzero()[:, 0])
    return BlockRowGroup(rows, padded, None, needs_inner_mask=False, shorter_rows=shorter_rows)


def _split_contiguous(rows: Tensor, columns: Tensor) -> list[tuple[Tensor, Tensor, int | None]]:
    """Split rows into runs of consecutive ones; an empty list where there are more than `MAX_RUNS`."""
    cuts = (rows.diff() != 1).nonzero()[:, 0] + 1
    if len(cuts) >= MAX_RUNS:
        return []
    parts = zip(rows.tensor_split(cuts), columns.tensor_split(cuts))
    return [(part_rows, part_columns, _row_step(part_rows, part_columns)) for part_rows, part_columns in parts]


def reachable_tokens(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions
) -> tuple[Bool[Tensor, " l"], Bool[Tensor, " s"]]:
    """Masks of the queries that may attend to some key and of the keys that some query may attend to."""

    # each token against the bounds of all tokens of the other side: linear in length, and never wrong about a hidden
    # one
    def of_each_and_all(positions: TokenPositions) -> list[TokenBounds]:
        tokens = torch.arange(positions.position_ids.shape[0])
        return [block_bounds(positions, index, mask.periods) for index in (tokens[:, None], tokens[None])]

    q, all_q = of_each_and_all(query_positions)
    k, all_k = of_each_and_all(key_positions)
    return mask.bounds(q, all_k).any_visible, mask.bounds(all_q, k).any_visible


def dense_block_mask(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, q: Tensor, k: Tensor
) -> Bool[Tensor, "n c s"]:
    """The mask for rows of blocks with query indices (n, c) and key indices (n, s), within segments."""
    head = torch.zeros((), dtype=torch.long)
    query_positions = take_tokens(query_positions, q[:, :, None])
    key_positions = take_tokens(key_positions, k[:, None, :])
    visible = mask(head, query_positions, key_positions) & (query_positions.segment_ids == key_positions.segment_ids)
    return visible.expand(*q.shape, k.shape[1])


def _min_max(values: Int[Tensor, "*n c"]) -> tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]:
    low, high = values.aminmax(dim=-1)
    return low, high


def _coarsen(span: TokenBounds) -> TokenBounds:
    """Bounds of groups of `COARSENING` blocks."""

    def group(bound: Tensor) -> Tensor:
        return torch.cat([bound, bound[-1:].expand(-len(bound) % COARSENING)]).view(-1, COARSENING)

    def group_bounds(bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return group(bounds[0]).amin(-1), group(bounds[1]).amax(-1)

    rests = {period: group_bounds(bounds) for period, bounds in span.residues.items()}
    segments, roles, parts = map(group_bounds, (span.segments, span.roles, span.parts))
    return TokenBounds(*group_bounds((span.first, span.last)), segments, roles, parts, rests)


def _children(rows: Tensor, columns: Tensor, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
    step = torch.arange(COARSENING)
    row = (rows[:, None, None] * COARSENING + step[:, None]).expand(-1, COARSENING, COARSENING).flatten()
    column = (columns[:, None, None] * COARSENING + step).expand(-1, COARSENING, COARSENING).flatten()
    inside = (row < num_rows) & (column < num_columns)
    return row[inside], column[inside]


def _row_kinds(cover: BlockCover, rows: int) -> Int[Tensor, " n"]:
    """A number for each row of blocks; rows of equal numbers can share a call."""
    counts = torch.bincount(cover.rows, minlength=rows)
    partial = torch.bincount(cover.rows[~cover.full], minlength=rows) > 0
    return 2 * counts + partial


def _row_step(rows: Tensor, columns: Tensor) -> int | None:
    """By how many blocks (0 or 1) the keys move per row where rows and keys are contiguous, else None."""
    offsets = torch.arange(columns.shape[1])
    if not ((rows - rows[0] == torch.arange(len(rows))).all() and (columns - columns[:, :1] == offsets).all()):
        return None
    # step 1 is a window that moves with the queries, step 0 keys that all queries see, such as global ones
    for step in (1, 0):
        if (columns[:, 0] - columns[0, 0] == step * (rows - rows[0])).all():
            return step
    return None
