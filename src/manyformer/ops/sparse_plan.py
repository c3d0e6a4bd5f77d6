"""Turn a mask and token positions into a plan of attention calls: token order, blocks and inner masks."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from manyformer.core import ContiguousLayout, PackedLayout, PrefixedLayout, TokenPositions, tree_map
from manyformer.costs import COSTS
from manyformer.masks import Mask
from manyformer.masks.mask import take_tokens
from manyformer.ops import plan_search
from manyformer.ops.block_cover import BlockOrder, dense_block_mask, group_rows
from manyformer.ops.plan_search import PartChoice, PlanCandidate, PlanSearch
from manyformer.ops.static_layout import has_roles_or_parts, layout_is_complete, materialize

BLOCK = COSTS.sparse_block
PAIRS_PER_MASK = COSTS.pairs_per_mask
MAX_CACHED_PLANS = COSTS.max_cached_plans


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
        group = self.rows[0][0] if self.rows and self.rows[0] else None
        if group is None:
            return "nothing is visible"
        parts = " + ".join(_describe_part(part) for part in group.parts)
        num_more = len(self.rows[0]) - 1
        return parts + (f", and {num_more} more kinds of heads" if num_more else "")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def make_sparse_plan(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int
) -> SparsePlan:
    """The plan for these query and key positions, cached while their segment tensor exists or by static layout."""
    # a device context intercepts every call of torch, which takes as long as planning
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        return _plan(mask, query_positions, key_positions, heads)


def _plan(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> SparsePlan:
    if layout_is_complete(query_positions) and layout_is_complete(key_positions):
        return _plan_for_layouts(
            mask,
            heads,
            query_positions.layout,
            key_positions.layout,
            query_positions.position_ids.shape[1],
            key_positions.position_ids.shape[1],
        )
    same_tokens = query_positions.segment_ids is key_positions.segment_ids and not has_roles_or_parts(query_positions)
    if (
        mask.causal
        and same_tokens
        and isinstance(query_positions.layout, PackedLayout)
        and query_positions.layout.right_padded
    ):
        # with a causal mask no token sees padding on its right, so rows count as full
        return _plan_for_layouts(
            mask,
            heads,
            ContiguousLayout(),
            ContiguousLayout(),
            query_positions.position_ids.shape[1],
            query_positions.position_ids.shape[1],
        )
    if any(query_field is not key_field for query_field, key_field in zip(query_positions, key_positions)):
        return _plan_by_row(mask, query_positions, key_positions, heads)
    cached = _PLANS_BY_SEGMENTS.setdefault(query_positions.segment_ids, {})  # type: ignore[no-untyped-call]
    # roles and parts belong to the key because several may occur with the same segments
    key = (mask, heads, id(query_positions.position_ids), id(query_positions.roles), id(query_positions.part_ids))
    if key not in cached:
        # stored with the tensors, so that their ids cannot be reused
        cached[key] = (
            _plan_by_row(mask, query_positions, key_positions, heads),
            query_positions.position_ids,
            query_positions.roles,
            query_positions.part_ids,
        )
    return cached[key][0]  # type: ignore[no-any-return]


_PLANS_BY_SEGMENTS: WeakIdKeyDictionary = WeakIdKeyDictionary()


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
    padding = -queries % BLOCK if query_layout == key_layout and queries == keys else 0
    recipe = _recipe_for_layouts(mask, heads, query_layout, key_layout, queries + padding, keys + padding)
    query_positions, key_positions = (
        take_tokens(materialize(layout, length), 0) for layout, length in ((query_layout, queries), (key_layout, keys))
    )
    groups, cost = _head_groups(
        _make_search(mask, query_positions, key_positions, heads, recipe.sizes), mask, heads, recipe.parts
    )
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
    query_positions, key_positions = (
        take_tokens(materialize(layout, length), 0) for layout, length in ((query_layout, queries), (key_layout, keys))
    )
    return _cheapest_recipe(
        _make_search(mask, query_positions, key_positions, heads, tuple(plan_search.RATES)), mask, heads
    )


def _plan_by_row(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> SparsePlan:
    query_positions, key_positions = (
        tree_map(lambda field: field.cpu(), positions) for positions in (query_positions, key_positions)
    )
    batch = max(query_positions.position_ids.shape[0], key_positions.position_ids.shape[0])
    row_plans = []
    for row in range(batch):
        row_queries, row_keys = (
            take_tokens(positions, row % positions.position_ids.shape[0])
            for positions in (query_positions, key_positions)
        )
        search = _make_search(mask, row_queries, row_keys, heads, (BLOCK,))
        row_plans.append(_head_groups(search, mask, heads, _cheapest_recipe(search, mask, heads).parts))
    return SparsePlan(tuple(groups for groups, _ in row_plans), sum(cost for _, cost in row_plans) / max(batch, 1))


def _describe_part(part: MaskPart) -> str:
    size = f"{part.q.size} x {part.k.size}"
    if part.q.is_identity and part.k.is_identity:
        return f"blocks of {size}"
    covers_all = part.q.num_tokens == part.q.blocks.numel() and part.k.num_tokens == part.k.blocks.numel()
    return f"blocks of {size} among {'sorted' if covers_all else 'chosen'} tokens"


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
    query_positions, key_positions = search.query_positions, search.key_positions
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
        part = MaskPart(
            candidate.mask,
            candidate.q,
            candidate.k,
            tuple(_make_tiles(candidate, query_positions, key_positions)),
            is_exclusive,
        )
        groups.setdefault((is_exclusive, tuple(sorted(heads_of_part))), []).append(part)
    # merged parts come first, as merging writes all outputs, and among them those whose queries are a view
    by_exclusivity = sorted(groups.items(), key=lambda item: item[0][0])
    ordered = (
        (heads_of_part, sorted(mask_parts, key=lambda part: not part.q.is_view))
        for (_, heads_of_part), mask_parts in by_exclusivity
    )
    return tuple(HeadGroup(heads_of_part, tuple(mask_parts)) for heads_of_part, mask_parts in ordered), total


def _parts_per_query(candidates: list[tuple[PlanCandidate, list[int]]], heads: int, length: int) -> Int[Tensor, "h l"]:
    """The number of parts that each query of each head is in."""
    counts = torch.zeros(heads, length, dtype=torch.long)
    for candidate, numbers in candidates:
        counts[torch.tensor(numbers)[:, None], _written_queries(candidate)] += 1
    return counts


def _written_queries(candidate: PlanCandidate) -> Int[Tensor, " t"]:
    """The tokens whose outputs a part writes."""
    written = candidate.q.blocks[candidate.cover.rows] if candidate.q.is_view else candidate.q.tokens
    return torch.unique(written)  # type: ignore[no-any-return]


def _make_tiles(
    candidate: PlanCandidate, query_positions: TokenPositions, key_positions: TokenPositions
) -> Iterator[BlockTiles]:
    for rows, columns, step, needs_inner_mask, shorter_rows in group_rows(candidate.cover, len(candidate.q.blocks)):
        inner = _inner_mask(candidate, query_positions, key_positions, rows, columns) if needs_inner_mask else None
        if inner is not None and not inner.any():
            continue
        rows_without_keys = None if inner is None or inner.any(-1).all() else ~inner.any(-1)
        yield BlockTiles(
            rows, columns, step, inner, rows_without_keys, shorter_rows, rows_adjacent=bool((rows.diff() == 1).all())
        )


def _inner_mask(
    candidate: PlanCandidate,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    rows: Tensor,
    columns: Tensor,
) -> Bool[Tensor, "r c s"]:
    """The mask within the blocks; a single row's where all rows have the same."""
    q, k = candidate.q, candidate.k
    valid = (torch.arange(k.blocks.numel()) < k.num_tokens).view_as(k.blocks)
    chunk = max(PAIRS_PER_MASK // (q.size * columns.shape[1] * k.size), 1)
    pieces: list[Tensor] = []
    is_uniform = True
    for row, column in zip(torch.split(rows, chunk), torch.split(columns, chunk)):
        block_visible = dense_block_mask(
            candidate.mask, query_positions, key_positions, q.blocks[row], k.blocks[column].flatten(1)
        )
        block_visible = block_visible & valid[column].flatten(1)[:, None, :]
        is_uniform = is_uniform and bool((block_visible == (pieces[0][:1] if pieces else block_visible[:1])).all())
        pieces.append(block_visible)
    return pieces[0][:1].clone() if is_uniform else torch.cat(pieces)
