"""Search for the cheapest way to split a mask into parts: their tokens, token order and block size."""

import itertools
from functools import cache, reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, TokenPositions
from manyformer.masks import Mask, NotMask, SameDocument, union
from manyformer.masks.mask import simplify_and
from manyformer.ops import block_cover
from manyformer.ops.block_cover import BlockCover, BlockOrder

CHOSEN = 7 / 8
"""A part that involves more than this share of all tokens uses all: selecting some would cost more."""


# What the search compares, in the time of one (query, key) pair of one head in large blocks.

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


class PlanCandidate(NamedTuple):
    """A part without its inner masks, and its cost per head."""

    mask: Mask
    q: BlockOrder
    k: BlockOrder
    cover: BlockCover
    size: int
    cost: float


PartChoice = tuple[tuple[int, ...], ...]
"""For each part in order, the indices of the mask's terms that it consists of."""


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
        segment_ids = torch.cat([query_positions.segment_ids, key_positions.segment_ids])
        self.single_document = bool((segment_ids == segment_ids[0]).all())
        self.reachable = cache(lambda mask: block_cover.reachable_tokens(mask, query_positions, key_positions))
        self.candidate = cache(self._make_candidate)

    def best_parts(self, mask: Mask) -> PartChoice:
        """The cheapest choice with some terms as parts of their own and all other terms in one part."""
        terms = mask.disjuncts()
        order = sorted(range(len(terms)), key=lambda number: self._rank(terms[number]))
        single = [(number,) for number in order]
        options: list[PartChoice] = [(*single[:alone], tuple(order[alone:])) for alone in range(len(order))]
        return min(options, key=lambda parts: self.cost(self.candidates(mask, parts)), default=())

    def candidates(self, mask: Mask, parts: PartChoice) -> list[PlanCandidate]:
        """The non-empty parts of a mask, each without the pairs of earlier parts."""
        terms = mask.disjuncts()
        part_masks = []
        covered_terms: list[Mask] = []
        for part in parts:
            part_terms = [terms[number] for number in part]
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
