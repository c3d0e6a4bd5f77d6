"""The cheapest parts of a mask between some places: which tokens in which order, in blocks of which size."""

import itertools
from functools import cache, reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, TokenPositions
from manyformer.masks import Mask, NotMask, SameDocument, union
from manyformer.masks.mask import simplify_and
from manyformer.ops.block_cover import (
    BlockCover,
    BlockOrder,
    cover_blocks,
    group_rows,
    order_into_blocks,
    reachable_tokens,
    span_of,
)

# a pair of a query and a key in blocks of this size costs this much, against one in large blocks; measured
RATES = {64: 1.1, 128: 1.0, 256: 1.0}
MASKED = 0.1
"""A pair costs so much more where an inner mask is added to the scores."""
CALL = 8_000
"""One more call costs about as much as this many (query, key) pairs, forward and backward."""
MERGE = 12
"""Merging one token's output of two parts costs about as much as this many pairs."""
GATHER = 8
"""Collecting one key that a block of queries sees, and its gradient, costs about as much as this many pairs."""
CHOSEN = 7 / 8
"""Where a mask is about more than this share of all tokens, they are better left where they are than collected."""


class PlanCandidate(NamedTuple):
    """A part before its inner masks are written out, and what it would cost a head."""

    mask: Mask
    q: BlockOrder
    k: BlockOrder
    cover: BlockCover
    size: int
    cost: float


PartChoice = tuple[tuple[int, ...], ...]
"""Which terms of a mask, by their numbers, make a part together, in the order of the parts."""


class PlanSearch:
    """Looks for the cheapest parts of masks between some places, and remembers: heads often differ in one term."""

    def __init__(
        self, query_positions: TokenPositions, key_positions: TokenPositions, sizes: tuple[int, ...], common: set[Mask]
    ) -> None:
        self.at, self.of, self.sizes, self.common = query_positions, key_positions, sizes, common
        # all tokens of one document
        self.alike = bool(
            (query_positions.segment_ids == query_positions.segment_ids[0]).all()
            and (key_positions.segment_ids == query_positions.segment_ids[0]).all()
        )
        self.seen = cache(lambda mask: reachable_tokens(mask, query_positions, key_positions))
        self.sketch = cache(self._sketch)

    def best(self, mask: Mask) -> PartChoice:
        """Some terms as a part each and all others together, whatever is cheapest."""
        terms = mask.disjuncts()
        order = sorted(range(len(terms)), key=lambda number: self._rank(terms[number]))
        single = [(number,) for number in order]
        options: list[PartChoice] = [(*single[:alone], tuple(order[alone:])) for alone in range(len(order))]
        return min(options, key=lambda parts: self.cost(self.sketches(mask, parts)), default=())

    def sketches(self, mask: Mask, parts: PartChoice) -> list[PlanCandidate]:
        """The parts of a mask, each without what earlier ones show; those left out that show nothing at all."""
        terms, every = mask.disjuncts(), []
        shown: list[Mask] = []
        for part in parts:
            some = [terms[number] for number in part]
            every.append(reduce(simplify_and, [NotMask(other) for other in shown], union(some)))
            shown += some
        found = map(self.sketch, every)
        return [one for one in found if one is not None]

    def cost(self, sketches: list[PlanCandidate]) -> float:
        """What these parts of a mask cost together."""
        merged = sum(sketch.q.real for sketch in sketches) - self.at.position_ids.shape[0]
        return sum((sketch.cost for sketch in sketches), 0.0) + MERGE * max(merged, 0)

    def _rank(self, term: Mask) -> tuple[bool, int]:
        """Terms of all heads come first, then by how many tokens a term is about.

        Those about few come first, whole, and leave whole blocks to others or none. Where it is less than a block,
        others would be left with blocks that are all but whole: that is no gain.
        """
        few = min(int(_worth(one).sum()) for one in self.seen(term))
        return term not in self.common, few if few >= min(RATES) else self.at.position_ids.shape[0]

    def _sketch(self, mask: Mask) -> PlanCandidate | None:
        """The cheapest order and size of blocks for one mask; None where it shows nothing at all."""
        at, of = self.at, self.of
        queries, keys = (
            _worth(one & (place.segment_ids != PADDING_SEGMENT)) for one, place in zip(self.seen(mask), (at, of))
        )
        if not queries.any() or not keys.any():
            return None
        own = mask if self.alike else simplify_and(mask, SameDocument())
        cuts = itertools.product((None, *sorted(mask.periods)), self.sizes)
        best = min((_cut(own, at, of, queries, keys, *cut) for cut in cuts), key=lambda sketch: sketch.cost)
        return best if len(best.cover.rows) else None


def _worth(chosen: Bool[Tensor, " l"]) -> Bool[Tensor, " l"]:
    """The same, or all tokens where that is little more."""
    return torch.ones_like(chosen) if chosen.sum() > CHOSEN * len(chosen) else chosen


def _cut(
    mask: Mask,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    queries: Tensor,
    keys: Tensor,
    period: int | None,
    size: int,
) -> PlanCandidate:
    q = order_into_blocks(query_positions, None if queries.all() else queries, period, size)
    k = order_into_blocks(key_positions, None if keys.all() else keys, period, size)
    found = cover_blocks(
        mask, span_of(query_positions, q.blocks, mask.periods), span_of(key_positions, k.blocks, mask.periods)
    )
    # the last block of keys is filled up with repetitions, which an inner mask must hide
    if k.real % k.size:
        found = found._replace(full=found.full & (found.columns != len(k.blocks) - 1))
    calls = group_rows(found, len(q.blocks))
    gathered = k.size * sum(call.columns.numel() for call in calls if call.step is None)
    masked = sum(call.columns.numel() for call in calls if call.needs_inner_mask)
    pairs = (RATES[size] * len(found.rows) + MASKED * masked) * q.size * k.size
    return PlanCandidate(mask, q, k, found, size, pairs + GATHER * gathered + CALL * len(calls))
