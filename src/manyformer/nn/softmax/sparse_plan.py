"""Plans of attention calls for a mask: which blocks of which tokens to compute, in the cheapest split into parts.

A plan lists, for groups of heads, parts of their mask, each with its tokens in an order of its own, cut into blocks.
`PlanSearch` compares the ways to split a mask; `make_sparse_plan` makes the calls of the cheapest one, and keeps them.
"""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, lru_cache, reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout, PrefixedLayout, TokenPositions, tree_map
from manyformer.nn.masks.local import SameDocument
from manyformer.nn.masks.mask import Mask, NotMask, simplify_and, take_tokens, union
from manyformer.nn.ops.static_layout import cache_by_tokens, has_roles_or_parts, layout_is_complete, materialize
from manyformer.nn.runtime.torch_internals import compiler_disabled
from manyformer.nn.softmax import block_cover
from manyformer.nn.softmax.block_cover import BlockCover, BlockOrder, dense_block_mask, group_rows

CHOSEN = 7 / 8
"""A part that involves more than this share of all tokens uses all: selecting some would cost more."""

# what the search compares, in the time of one (query, key) pair of one head in large blocks
PAIR_RATES = {64: 1.1, 128: 1.0, 256: 1.0}
"""The cost of a pair by the size of its block, for each size that the search tries."""

MASKED_PAIR = 0.1
"""Additional cost of a pair where an inner mask is added to the scores."""

CALL = 8_000
"""Cost of a call, forward and backward."""

MERGED_TOKEN = 12
"""Cost of merging one token's outputs of two parts."""

GATHERED_KEY = 8
"""Cost of gathering one key for a block of queries, and of scattering its gradient."""

BLOCK = 128
"""Block size where searching for the best one would cost more than it gains."""

PAIRS_PER_MASK = 1 << 20
"""Inner masks are evaluated for this many pairs at a time."""

MAX_CACHED_PLANS = 512
"""Cached plans for rows of one document: a few masks times many document lengths."""

MIN_ROW_PLAN_PAIRS = 1 << 20
"""With fewer (query, key) pairs of all heads, a plan for one row alone costs more than skipping masked blocks saves."""


class BlockTiles(NamedTuple):
    """Query blocks with equally many key blocks.

    `step` is by how many blocks the first key block moves per row, where rows and the key blocks of a row are
    contiguous and nothing has to be gathered. `inner` is the mask within the blocks, where needed, of a single row if
    all rows have the same; `rows_without_keys` are its queries without a visible key. `shorter_rows` are pairs of a row
    and its number of key blocks, where that is smaller. `rows_adjacent`: whether the rows are consecutive.
    """

    rows: Int[Tensor, " n"]
    columns: Int[Tensor, "n m"]
    step: int | None
    inner: Bool[Tensor, "r c s"] | None
    rows_without_keys: Bool[Tensor, "r c"] | None
    shorter_rows: tuple[tuple[int, int], ...]
    rows_adjacent: bool

    @property
    def same_keys(self) -> bool:
        """Whether all rows attend to the same keys without an inner mask."""
        return self.step == 0 and self.inner is None


class MaskPart(NamedTuple):
    """Queries, keys and the visible pairs among them; no pair is in two parts.

    If it `is_exclusive`, none of its queries is in another part: there is nothing to merge.
    """

    mask: Mask
    q: BlockOrder
    k: BlockOrder
    tiles: tuple[BlockTiles, ...]
    is_exclusive: bool


PartChoice = tuple[tuple[int, ...], ...]
"""For each part in order, the indices of the mask's terms that it consists of."""


class PlanRecipe(NamedTuple):
    """Block sizes, and the parts of each distinct head mask, from which a plan is made."""

    sizes: tuple[int, ...]
    parts: tuple[PartChoice, ...]


class HeadGroup(NamedTuple):
    """Heads with equal masks, and the parts of that mask."""

    heads: tuple[int, ...]
    parts: tuple[MaskPart, ...]

    @property
    def num_pairs(self) -> int:
        """Number of computed (head, query, key) triples."""
        blocks = ((part.q.size * part.k.size, tiles.columns.numel()) for part in self.parts for tiles in part.tiles)
        return len(self.heads) * sum(size * count for size, count in blocks)

    @property
    def num_gathered(self) -> int:
        """Number of gathered (head, key) pairs."""
        tiles = ((part.k.size, tiles) for part in self.parts for tiles in part.tiles if tiles.step is None)
        return len(self.heads) * sum(size * group_tiles.columns.numel() for size, group_tiles in tiles)


class SparsePlan(NamedTuple):
    """The calls for each row of the batch, or one entry for all rows; `cost` in (head, query, key) triples per row."""

    rows: tuple[tuple[HeadGroup, ...], ...]
    cost: float

    def num_pairs(self, batch: int) -> int:
        """Number of computed (head, query, key) triples for `batch` rows."""
        per_row = [sum(group.num_pairs for group in groups) for groups in self.rows]
        return sum(per_row[row % len(per_row)] for row in range(batch))

    def num_gathered(self, batch: int) -> int:
        """Number of gathered (head, key) pairs for `batch` rows."""
        per_row = [sum(group.num_gathered for group in groups) for groups in self.rows]
        return sum(per_row[row % len(per_row)] for row in range(batch))

    def describe(self) -> str:
        """One sentence on what is computed."""
        group = None
        if self.rows and self.rows[0]:
            group = self.rows[0][0]
        if group is None:
            return "nothing is visible"
        parts = " + ".join(_describe_part(part) for part in group.parts)
        num_more = len(self.rows[0]) - 1
        return parts + (f", and {num_more} more kinds of heads" if num_more else "")


def _describe_part(part: MaskPart) -> str:
    size = f"{part.q.size} x {part.k.size}"
    if part.q.is_identity and part.k.is_identity:
        return f"blocks of {size}"
    covers_all = part.q.num_tokens == part.q.blocks.numel() and part.k.num_tokens == part.k.blocks.numel()
    return f"blocks of {size} among {'sorted' if covers_all else 'chosen'} tokens"


class PlanCandidate(NamedTuple):
    """A part without its inner masks, and its cost per head."""

    mask: Mask
    q: BlockOrder
    k: BlockOrder
    cover: BlockCover
    size: int
    cost: float


class PlanSearch:
    """Search for the cheapest parts of masks; candidates are cached because heads often differ in a single term."""

    def __init__(
        self, query_positions: TokenPositions, key_positions: TokenPositions, sizes: tuple[int, ...], common: set[Mask]
    ) -> None:
        self.query_positions = query_positions
        self.key_positions = key_positions
        self.sizes = sizes
        self.common = common
        # all tokens of one document
        # in a single document no pair needs a comparison of segments, and more blocks are fully visible
        segment_ids = torch.cat([query_positions.segment_ids, key_positions.segment_ids])
        self.single_document = bool((segment_ids == segment_ids[0]).all())
        self.reachable = cache(lambda mask: block_cover.reachable_tokens(mask, query_positions, key_positions))
        self.candidate = cache(self._make_candidate)

    def best_parts(self, mask: Mask) -> PartChoice:
        """The cheapest choice with some terms as parts of their own and all other terms in one part."""
        terms = mask.disjuncts()
        order = sorted(range(len(terms)), key=lambda number: self._rank(terms[number]))
        single = [(number,) for number in order]
        # one option for each number of terms on their own, not for every subset: terms are sorted by what they involve
        options: list[PartChoice] = [(*single[:alone], tuple(order[alone:])) for alone in range(len(order))]
        return min(options, key=lambda parts: self.cost(self.candidates(mask, parts)), default=())

    def candidates(self, mask: Mask, parts: PartChoice) -> list[PlanCandidate]:
        """The non-empty parts of a mask, each without the pairs of earlier parts."""
        terms = mask.disjuncts()
        part_masks = []
        covered_terms: list[Mask] = []
        for part in parts:
            part_terms = [terms[number] for number in part]
            # parts are disjoint, so that their outputs can be merged by their log-sum-exps
            part_masks.append(reduce(simplify_and, map(NotMask, covered_terms), union(part_terms)))
            covered_terms += part_terms
        candidates = map(self.candidate, part_masks)
        return [candidate for candidate in candidates if candidate is not None]

    def cost(self, candidates: list[PlanCandidate]) -> float:
        """Total cost of these parts of a mask, with merging."""
        merged = sum(candidate.q.num_tokens for candidate in candidates) - self.query_positions.position_ids.shape[0]
        return sum((candidate.cost for candidate in candidates), 0.0) + MERGED_TOKEN * max(merged, 0)

    def _rank(self, term: Mask) -> tuple[bool, int]:
        """Sort key: terms common to all heads first, then by the number of tokens that a term involves.

        Terms of few tokens come first, so that later parts consist of full blocks. Terms of less than a block of
        tokens do not: later parts would keep almost all of their blocks.
        """
        num_tokens = min(int(_all_if_nearly_all(tokens).sum()) for tokens in self.reachable(term))
        if num_tokens >= min(PAIR_RATES):
            rank = num_tokens
        else:
            rank = self.query_positions.position_ids.shape[0]
        return term not in self.common, rank

    def _make_candidate(self, mask: Mask) -> PlanCandidate | None:
        """The candidate with the cheapest token order and block size; None where no pair is visible."""
        query_positions = self.query_positions
        key_positions = self.key_positions
        queries, keys = (
            _all_if_nearly_all(reachable & (positions.segment_ids != PADDING_SEGMENT))
            for reachable, positions in zip(self.reachable(mask), (query_positions, key_positions))
        )
        if not queries.any() or not keys.any():
            return None
        if self.single_document:
            segment_mask = mask
        else:
            segment_mask = simplify_and(mask, SameDocument())
        # sorted by residues, the keys of a dilated or strided pattern fill blocks
        cuts = itertools.product((None, *sorted(mask.periods)), self.sizes)
        arguments = segment_mask, query_positions, key_positions, queries, keys
        cheapest = min((_cover_candidate(*arguments, *cut) for cut in cuts), key=lambda candidate: candidate.cost)
        if len(cheapest.cover.rows):
            return cheapest
        return None


def _all_if_nearly_all(selected: Bool[Tensor, " l"]) -> Bool[Tensor, " l"]:
    """The mask `selected`, or all tokens where it selects almost all."""
    if selected.sum() > CHOSEN * len(selected):
        return torch.ones_like(selected)
    return selected


def _cover_candidate(
    mask: Mask,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    queries: Tensor,
    keys: Tensor,
    period: int | None,
    size: int,
) -> PlanCandidate:
    q = block_cover.order_into_blocks(query_positions, None if queries.all() else queries, period, size)
    k = block_cover.order_into_blocks(key_positions, None if keys.all() else keys, period, size)
    query_bounds = block_cover.block_bounds(query_positions, q.blocks, mask.periods)
    cover = block_cover.cover_blocks(
        mask, query_bounds, block_cover.block_bounds(key_positions, k.blocks, mask.periods)
    )
    # the last key block is padded with repeated keys, which an inner mask must hide
    if k.num_tokens % k.size:
        cover = cover._replace(full=cover.full & (cover.columns != len(k.blocks) - 1))
    calls = block_cover.group_rows(cover, len(q.blocks))
    gathered = k.size * sum(call.columns.numel() for call in calls if call.step is None)
    masked = sum(call.columns.numel() for call in calls if call.needs_inner_mask)
    pairs = (PAIR_RATES[size] * len(cover.rows) + MASKED_PAIR * masked) * q.size * k.size
    return PlanCandidate(mask, q, k, cover, size, pairs + GATHERED_KEY * gathered + CALL * len(calls))


@compiler_disabled
def make_sparse_plan(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int
) -> SparsePlan:
    """The plan for these query and key positions, cached while their segment tensor exists or by static layout."""
    # a device context intercepts every call of torch, which takes as long as planning
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        return _plan(mask, query_positions, key_positions, heads)


def repays_planning(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> bool:
    """Whether skipped blocks can save more than planning costs, which depends on whether all rows share one plan."""
    pairs = query_positions.position_ids.shape[1] * key_positions.position_ids.shape[1]
    return heads * pairs >= MIN_ROW_PLAN_PAIRS or _shared_layouts(mask, query_positions, key_positions) is not None


def _plan(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> SparsePlan:
    layouts = _shared_layouts(mask, query_positions, key_positions)
    if layouts is None:
        return _plan_by_row(mask, query_positions, key_positions, heads)
    lengths = query_positions.position_ids.shape[1], key_positions.position_ids.shape[1]
    return _plan_for_layouts(mask, heads, *layouts, *lengths)


def _shared_layouts(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions
) -> tuple[ContiguousLayout | PrefixedLayout, ContiguousLayout | PrefixedLayout] | None:
    """The layouts of queries and keys for which one plan serves all rows; None if each row needs its own."""
    layout = query_positions.layout
    key_layout = key_positions.layout
    if layout_is_complete(query_positions) and layout_is_complete(key_positions):
        assert isinstance(layout, ContiguousLayout | PrefixedLayout)
        assert isinstance(key_layout, ContiguousLayout | PrefixedLayout)
        return layout, key_layout
    same_tokens = query_positions.segment_ids is key_positions.segment_ids and not has_roles_or_parts(query_positions)
    if mask.causal and same_tokens and isinstance(layout, PackedLayout) and layout.right_padded:
        # with a causal mask no token sees padding on its right, so rows count as full
        return ContiguousLayout(), ContiguousLayout()
    return None


@lru_cache(maxsize=MAX_CACHED_PLANS)
def _plan_for_layouts(
    mask: Mask,
    heads: int,
    query_layout: ContiguousLayout | PrefixedLayout,
    key_layout: ContiguousLayout | PrefixedLayout,
    queries: int,
    keys: int,
) -> SparsePlan:
    # the cheapest recipe for a length is also used for slightly shorter documents
    padding = 0
    if query_layout == key_layout and queries == keys:
        padding = -queries % BLOCK
    recipe = _recipe_for_layouts(mask, heads, query_layout, key_layout, queries + padding, keys + padding)
    positions = _one_row(query_layout, queries), _one_row(key_layout, keys)
    groups, cost = _head_groups(_make_search(mask, *positions, heads, recipe.sizes), mask, heads, recipe.parts)
    return SparsePlan((groups,), cost)


@lru_cache(maxsize=MAX_CACHED_PLANS)
def _recipe_for_layouts(
    mask: Mask,
    heads: int,
    query_layout: ContiguousLayout | PrefixedLayout,
    key_layout: ContiguousLayout | PrefixedLayout,
    queries: int,
    keys: int,
) -> PlanRecipe:
    positions = _one_row(query_layout, queries), _one_row(key_layout, keys)
    return _cheapest_recipe(_make_search(mask, *positions, heads, tuple(PAIR_RATES)), mask, heads)


def _one_row(layout: ContiguousLayout | PrefixedLayout, length: int) -> TokenPositions:
    return take_tokens(materialize(layout, length), 0)


@cache_by_tokens
def _plan_by_row(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> SparsePlan:
    query_positions, key_positions = (
        tree_map(lambda field: field.cpu(), positions) for positions in (query_positions, key_positions)
    )
    batch = max(query_positions.position_ids.shape[0], key_positions.position_ids.shape[0])
    row_plans = []
    for row in range(batch):
        row_queries = take_tokens(query_positions, row % query_positions.position_ids.shape[0])
        row_keys = take_tokens(key_positions, row % key_positions.position_ids.shape[0])
        # a plan for one row is used once: trying several sizes would not pay
        search = _make_search(mask, row_queries, row_keys, heads, (BLOCK,))
        row_plans.append(_head_groups(search, mask, heads, _cheapest_recipe(search, mask, heads).parts))
    return SparsePlan(tuple(groups for groups, _ in row_plans), sum(cost for _, cost in row_plans) / max(batch, 1))


def _heads_by_mask(mask: Mask, heads: int) -> dict[Mask, list[int]]:
    """The distinct masks of single heads, and the heads that have them."""
    heads_by_mask: dict[Mask, list[int]] = {}
    for head in range(heads):
        heads_by_mask.setdefault(mask.for_head(head), []).append(head)
    return heads_by_mask


def _make_search(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int, sizes: tuple[int, ...]
) -> PlanSearch:
    common = set[Mask].intersection(*(set(kind.disjuncts()) for kind in _heads_by_mask(mask, heads)))
    return PlanSearch(query_positions, key_positions, sizes, common)


def _cheapest_recipe(search: PlanSearch, mask: Mask, heads: int) -> PlanRecipe:
    parts: list[PartChoice] = []
    sizes: set[int] = set()
    for number, head_mask in enumerate(_heads_by_mask(mask, heads)):
        # random blocks differ from head to head, but not in what they cost
        parts.append(parts[0] if number and mask.uniform_over_heads else search.best_parts(head_mask))
        sizes.update(candidate.size for candidate in search.candidates(head_mask, parts[-1]))
    return PlanRecipe(tuple(sorted(sizes)) or search.sizes, tuple(parts))


def _head_groups(
    search: PlanSearch, mask: Mask, heads: int, parts: tuple[PartChoice, ...]
) -> tuple[tuple[HeadGroup, ...], float]:
    """The calls for the chosen parts of each distinct head mask, and their cost."""
    query_positions = search.query_positions
    key_positions = search.key_positions
    sharing: dict[int, tuple[PlanCandidate, list[int]]] = {}
    total = 0.0
    for (head_mask, heads_of_part), choice in zip(_heads_by_mask(mask, heads).items(), parts):
        candidates = search.candidates(head_mask, choice)
        total += len(heads_of_part) * search.cost(candidates)
        for candidate in candidates:
            # candidates are cached by mask: heads whose masks share a term share its part, and one call
            sharing.setdefault(id(candidate), (candidate, []))[1].extend(heads_of_part)
    groups: dict[tuple[bool, tuple[int, ...]], list[MaskPart]] = {}
    # only queries of several parts have outputs to merge
    part_counts = _parts_per_query(list(sharing.values()), heads, len(query_positions.position_ids))
    for candidate, heads_of_part in sharing.values():
        is_exclusive = bool((part_counts[heads_of_part][:, _written_queries(candidate)] == 1).all())
        tiles = tuple(_make_tiles(candidate, query_positions, key_positions))
        part = MaskPart(candidate.mask, candidate.q, candidate.k, tiles, is_exclusive)
        groups.setdefault((is_exclusive, tuple(sorted(heads_of_part))), []).append(part)
    # merged parts come first, as merging writes all outputs, and among them those whose queries are a view
    by_exclusivity = sorted(groups.items(), key=lambda item: item[0][0])
    head_groups = (
        HeadGroup(heads_of_part, tuple(sorted(mask_parts, key=lambda part: not part.q.is_view)))
        for (_, heads_of_part), mask_parts in by_exclusivity
    )
    return tuple(head_groups), total


def _parts_per_query(candidates: list[tuple[PlanCandidate, list[int]]], heads: int, length: int) -> Int[Tensor, "h l"]:
    """The number of parts that each query of each head is in."""
    counts = torch.zeros(heads, length, dtype=torch.long)
    for candidate, numbers in candidates:
        counts[torch.tensor(numbers)[:, None], _written_queries(candidate)] += 1
    return counts


def _written_queries(candidate: PlanCandidate) -> Int[Tensor, " t"]:
    """The tokens whose outputs a part writes."""
    if candidate.q.is_view:
        written = candidate.q.blocks[candidate.cover.rows]
    else:
        written = candidate.q.tokens
    return torch.unique(written)  # type: ignore[no-any-return]


def _make_tiles(
    candidate: PlanCandidate, query_positions: TokenPositions, key_positions: TokenPositions
) -> Iterator[BlockTiles]:
    for rows, columns, step, needs_inner_mask, shorter_rows in group_rows(candidate.cover, len(candidate.q.blocks)):
        inner = None
        if needs_inner_mask:
            inner = _inner_mask(candidate, query_positions, key_positions, rows, columns)
        # bounds are loose: blocks that may hold a visible pair sometimes hold none
        if inner is not None and not inner.any():
            continue
        if inner is None or inner.any(-1).all():
            rows_without_keys = None
        else:
            rows_without_keys = ~inner.any(-1)
        are_adjacent = bool((rows.diff() == 1).all())
        yield BlockTiles(rows, columns, step, inner, rows_without_keys, shorter_rows, rows_adjacent=are_adjacent)


def _inner_mask(
    candidate: PlanCandidate,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    rows: Tensor,
    columns: Tensor,
) -> Bool[Tensor, "r c s"]:
    """The mask within the blocks; a single row's where all rows have the same."""
    q = candidate.q
    k = candidate.k
    valid = (torch.arange(k.blocks.numel()) < k.num_tokens).view_as(k.blocks)
    # a few rows at a time, because masks of all pairs of a long row would not fit into memory
    chunk = max(PAIRS_PER_MASK // (q.size * columns.shape[1] * k.size), 1)
    pieces: list[Tensor] = []
    is_uniform = True
    for row, column in zip(torch.split(rows, chunk), torch.split(columns, chunk)):
        blocks = q.blocks[row], k.blocks[column].flatten(1)
        block_visible = dense_block_mask(candidate.mask, query_positions, key_positions, *blocks)
        block_visible = block_visible & valid[column].flatten(1)[:, None, :]
        is_uniform = is_uniform and bool((block_visible == (pieces[0][:1] if pieces else block_visible[:1])).all())
        pieces.append(block_visible)
    if is_uniform:
        return pieces[0][:1].clone()
    return torch.cat(pieces)
