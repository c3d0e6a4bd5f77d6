"""From a mask and places to a list of attention calls: which tokens in which order, which blocks, which inner masks."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from manyformer.core import ContiguousLayout, PackedLayout, PrefixedLayout, TokenPositions, tree_map
from manyformer.masks import Mask
from manyformer.masks.mask import take_tokens
from manyformer.ops import plan_search
from manyformer.ops.block_cover import BlockOrder, group_rows, visible
from manyformer.ops.plan_search import PartChoice, PlanCandidate, PlanSearch
from manyformer.ops.static_layout import has_roles_or_parts, layout_is_complete, materialize

BLOCK = 128
"""The block where searching for the best one would cost more than it gains."""
PAIRS_PER_MASK = 1 << 20
"""Inner masks are written out for this many pairs at a time."""
REMEMBERED = 512
"""So many plans of rows that are one document: those of a few masks for documents of many lengths."""


class BlockTiles(NamedTuple):
    """Blocks of queries that see equally many blocks of keys.

    `step` says how the first key block moves from row to row where rows are neighbours and so are the key blocks of a
    row: then nothing has to be gathered. `inner` is the mask within the blocks where it is needed, of one row for
    all where all are alike; `rows_without_keys` are its queries that see none of the keys. `shorter_rows` are rows that
    see fewer blocks, and how many of the first ones. Rows are neighbours if they are `rows_adjacent` each other."""

    rows: Int[Tensor, " n"]
    columns: Int[Tensor, "n m"]
    step: int | None
    inner: Bool[Tensor, "r c s"] | None
    rows_without_keys: Bool[Tensor, "r c"] | None
    shorter_rows: tuple[tuple[int, int], ...]
    rows_adjacent: bool

    @property
    def same_keys(self) -> bool:
        """Whether all rows see all of the same keys."""
        return self.step == 0 and self.inner is None


class MaskPart(NamedTuple):
    """Some queries, some keys, and who sees whom among them; no pair is in two parts.

    If it is `alone`, none of its queries is in another part: there is nothing to merge.
    """

    mask: Mask
    q: BlockOrder
    k: BlockOrder
    tiles: tuple[BlockTiles, ...]
    alone: bool


class PlanRecipe(NamedTuple):
    """How to make a plan: in blocks of which sizes, and from which parts of the mask of each kind of heads."""

    sizes: tuple[int, ...]
    parts: tuple[PartChoice, ...]


class HeadGroup(NamedTuple):
    """Heads that see the same."""

    heads: tuple[int, ...]
    parts: tuple[MaskPart, ...]

    @property
    def pairs(self) -> int:
        """How many (head, query, key) triples are computed."""
        blocks = ((part.q.size * part.k.size, tiles.columns.numel()) for part in self.parts for tiles in part.tiles)
        return len(self.heads) * sum(size * count for size, count in blocks)

    @property
    def gathered(self) -> int:
        """How many (head, key) pairs are collected."""
        tiles = ((part.k.size, tiles) for part in self.parts for tiles in part.tiles if tiles.step is None)
        return len(self.heads) * sum(size * some.columns.numel() for size, some in tiles)


class SparsePlan(NamedTuple):
    """The calls for each row of the batch, or for all rows alike; `cost` in (head, query, key) triples a row."""

    rows: tuple[tuple[HeadGroup, ...], ...]
    cost: float

    def pairs(self, batch: int) -> int:
        """How many (head, query, key) triples are computed for so many rows of a batch."""
        every = [sum(lane.pairs for lane in lanes) for lanes in self.rows]
        return sum(every[row % len(every)] for row in range(batch))

    def gathered(self, batch: int) -> int:
        """How many (head, key) pairs are collected for so many rows of a batch."""
        every = [sum(lane.gathered for lane in lanes) for lanes in self.rows]
        return sum(every[row % len(every)] for row in range(batch))

    def describe(self) -> str:
        """What is computed, in words."""
        lane = self.rows[0][0] if self.rows and self.rows[0] else None
        if lane is None:
            return "nothing is visible"
        parts = " + ".join(_words(part) for part in lane.parts)
        more = len(self.rows[0]) - 1
        return parts + (f", and {more} more kinds of heads" if more else "")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def make_sparse_plan(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int
) -> SparsePlan:
    """The calls for queries `query_positions` and keys `key_positions`, remembered for as long as these places can come
    again.
    """
    # such a context sees every call of torch, which takes as long as planning
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        return _plan(mask, query_positions, key_positions, heads)


def _plan(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> SparsePlan:
    if layout_is_complete(query_positions) and layout_is_complete(key_positions):
        return _spelled(
            mask,
            heads,
            query_positions.layout,
            key_positions.layout,
            query_positions.position_ids.shape[1],
            key_positions.position_ids.shape[1],
        )
    alone = query_positions.segment_ids is key_positions.segment_ids and not has_roles_or_parts(query_positions)
    if (
        mask.causal
        and alone
        and isinstance(query_positions.layout, PackedLayout)
        and query_positions.layout.right_padded
    ):
        # no token sees padding on its right, so rows may as well be full
        return _spelled(
            mask,
            heads,
            ContiguousLayout(),
            ContiguousLayout(),
            query_positions.position_ids.shape[1],
            query_positions.position_ids.shape[1],
        )
    if any(one is not other for one, other in zip(query_positions, key_positions)):
        return _by_row(mask, query_positions, key_positions, heads)
    known = _REMEMBERED.setdefault(query_positions.segment_ids, {})  # type: ignore[no-untyped-call]
    # role and part belong to the key because one set of segments may be asked about with several
    name = (mask, heads, id(query_positions.position_ids), id(query_positions.roles), id(query_positions.part_ids))
    if name not in known:
        # kept with them, so that nothing else can come to have their ids
        known[name] = (
            _by_row(mask, query_positions, key_positions, heads),
            query_positions.position_ids,
            query_positions.roles,
            query_positions.part_ids,
        )
    return known[name][0]  # type: ignore[no-any-return]


_REMEMBERED: WeakIdKeyDictionary = WeakIdKeyDictionary()


@lru_cache(maxsize=REMEMBERED)
def _spelled(
    mask: Mask,
    heads: int,
    mine: ContiguousLayout | PrefixedLayout,
    other: ContiguousLayout | PrefixedLayout,
    queries: int,
    keys: int,
) -> SparsePlan:
    # what is cheapest for a document is so for those that are a little shorter
    more = -queries % BLOCK if mine == other and queries == keys else 0
    way = _way(mask, heads, mine, other, queries + more, keys + more)
    at, of = (take_tokens(materialize(layout, length), 0) for layout, length in ((mine, queries), (other, keys)))
    lanes, cost = _lanes(_search(mask, at, of, heads, way.sizes), mask, heads, way.parts)
    return SparsePlan((lanes,), cost)


@lru_cache(maxsize=REMEMBERED)
def _way(
    mask: Mask,
    heads: int,
    mine: ContiguousLayout | PrefixedLayout,
    other: ContiguousLayout | PrefixedLayout,
    queries: int,
    keys: int,
) -> PlanRecipe:
    at, of = (take_tokens(materialize(layout, length), 0) for layout, length in ((mine, queries), (other, keys)))
    return _cheapest(_search(mask, at, of, heads, tuple(plan_search.RATES)), mask, heads)


def _by_row(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> SparsePlan:
    query_positions, key_positions = (
        tree_map(lambda field: field.cpu(), place) for place in (query_positions, key_positions)
    )
    batch = max(query_positions.position_ids.shape[0], key_positions.position_ids.shape[0])
    found = []
    for row in range(batch):
        one, other = (
            take_tokens(place, row % place.position_ids.shape[0]) for place in (query_positions, key_positions)
        )
        search = _search(mask, one, other, heads, (BLOCK,))
        found.append(_lanes(search, mask, heads, _cheapest(search, mask, heads).parts))
    return SparsePlan(tuple(lanes for lanes, _ in found), sum(cost for _, cost in found) / max(batch, 1))


def _words(part: MaskPart) -> str:
    size = f"{part.q.size} x {part.k.size}"
    if part.q.is_identity and part.k.is_identity:
        return f"blocks of {size}"
    every = part.q.real == part.q.blocks.numel() and part.k.real == part.k.blocks.numel()
    return f"blocks of {size} among {'sorted' if every else 'chosen'} tokens"


def _kinds(mask: Mask, heads: int) -> dict[Mask, list[int]]:
    """What different heads see, and which heads see it."""
    kinds: dict[Mask, list[int]] = {}
    for head in range(heads):
        kinds.setdefault(mask.for_head(head), []).append(head)
    return kinds


def _search(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int, sizes: tuple[int, ...]
) -> PlanSearch:
    common = set[Mask].intersection(*(set(kind.disjuncts()) for kind in _kinds(mask, heads)))
    return PlanSearch(query_positions, key_positions, sizes, common)


def _cheapest(search: PlanSearch, mask: Mask, heads: int) -> PlanRecipe:
    parts: list[PartChoice] = []
    sizes: set[int] = set()
    for number, kind in enumerate(_kinds(mask, heads)):
        parts.append(parts[0] if number and mask.uniform_over_heads else search.best(kind))
        sizes.update(one.size for one in search.sketches(kind, parts[-1]))
    return PlanRecipe(tuple(sorted(sizes)) or search.sizes, tuple(parts))


def _lanes(
    search: PlanSearch, mask: Mask, heads: int, parts: tuple[PartChoice, ...]
) -> tuple[tuple[HeadGroup, ...], float]:
    """The calls for some parts of the mask of each kind of heads, and what they cost."""
    at, of = search.at, search.of
    sharing: dict[int, tuple[PlanCandidate, list[int]]] = {}
    total = 0.0
    for (kind, numbers), some in zip(_kinds(mask, heads).items(), parts):
        sketches = search.sketches(kind, some)
        total += len(numbers) * search.cost(sketches)
        for one in sketches:
            sharing.setdefault(id(one), (one, []))[1].extend(numbers)
    lanes: dict[tuple[bool, tuple[int, ...]], list[MaskPart]] = {}
    met = _met(list(sharing.values()), heads, len(at.position_ids))
    for one, numbers in sharing.values():
        alone = bool((met[numbers][:, _queries(one)] == 1).all())
        part = MaskPart(one.mask, one.q, one.k, tuple(_tiles(one, at, of)), alone)
        lanes.setdefault((alone, tuple(sorted(numbers))), []).append(part)
    # what is merged comes first, as merging writes all outputs, and of that what writes straight to where it belongs
    found = sorted(lanes.items(), key=lambda item: item[0][0])
    ordered = ((numbers, sorted(some, key=lambda part: not part.q.in_place)) for (_, numbers), some in found)
    return tuple(HeadGroup(numbers, tuple(some)) for numbers, some in ordered), total


def _met(sketches: list[tuple[PlanCandidate, list[int]]], heads: int, length: int) -> Int[Tensor, "h l"]:
    """In how many parts each query is."""
    met = torch.zeros(heads, length, dtype=torch.long)
    for one, numbers in sketches:
        met[torch.tensor(numbers)[:, None], _queries(one)] += 1
    return met


def _queries(made: PlanCandidate) -> Int[Tensor, " t"]:
    """The tokens to which a part writes."""
    written = made.q.blocks[made.cover.rows] if made.q.in_place else made.q.tokens
    return torch.unique(written)  # type: ignore[no-any-return]


def _tiles(made: PlanCandidate, query_positions: TokenPositions, key_positions: TokenPositions) -> Iterator[BlockTiles]:
    for rows, columns, step, partial, short in group_rows(made.cover, len(made.q.blocks)):
        inner = _inner(made, query_positions, key_positions, rows, columns) if partial else None
        if inner is not None and not inner.any():
            continue
        blind = None if inner is None or inner.any(-1).all() else ~inner.any(-1)
        yield BlockTiles(rows, columns, step, inner, blind, short, rows_adjacent=bool((rows.diff() == 1).all()))


def _inner(
    made: PlanCandidate, query_positions: TokenPositions, key_positions: TokenPositions, rows: Tensor, columns: Tensor
) -> Bool[Tensor, "r c s"]:
    """The mask within the blocks; a single one where all rows have the same."""
    q, k = made.q, made.k
    real = (torch.arange(k.blocks.numel()) < k.real).view_as(k.blocks)
    chunk = max(PAIRS_PER_MASK // (q.size * columns.shape[1] * k.size), 1)
    pieces: list[Tensor] = []
    alike = True
    for row, column in zip(torch.split(rows, chunk), torch.split(columns, chunk)):
        seen = visible(made.mask, query_positions, key_positions, q.blocks[row], k.blocks[column].flatten(1))
        seen = seen & real[column].flatten(1)[:, None, :]
        alike = alike and bool((seen == (pieces[0][:1] if pieces else seen[:1])).all())
        pieces.append(seen)
    return pieces[0][:1].clone() if alike else torch.cat(pieces)
