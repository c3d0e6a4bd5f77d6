"""Turn a mask and token positions into a plan of attention calls: token order, blocks and inner masks."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import ContiguousLayout, PackedLayout, PrefixedLayout, TokenPositions, tree_map
from manyformer.masks import Mask
from manyformer.masks.mask import take_tokens
from manyformer.ops import plan_search
from manyformer.ops.block_cover import dense_block_mask, group_rows
from manyformer.ops.plan_records import BlockTiles, HeadGroup, MaskPart, PlanRecipe, SparsePlan
from manyformer.ops.plan_search import PartChoice, PlanCandidate, PlanSearch
from manyformer.ops.static_layout import cache_by_tokens, has_roles_or_parts, layout_is_complete, materialize
from manyformer.torch_internals import compiler_disabled

BLOCK = 128
"""Block size where searching for the best one would cost more than it gains."""

PAIRS_PER_MASK = 1 << 20
"""Inner masks are evaluated for this many pairs at a time."""

MAX_CACHED_PLANS = 512
"""Cached plans for rows of one document: a few masks times many document lengths."""

MIN_ROW_PLAN_PAIRS = 1 << 20
"""With fewer (query, key) pairs of all heads, a plan for one row alone costs more than skipping masked blocks saves."""


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
    return _cheapest_recipe(_make_search(mask, *positions, heads, tuple(plan_search.PAIR_RATES)), mask, heads)


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
            sharing.setdefault(id(candidate), (candidate, []))[1].extend(heads_of_part)
    groups: dict[tuple[bool, tuple[int, ...]], list[MaskPart]] = {}
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
