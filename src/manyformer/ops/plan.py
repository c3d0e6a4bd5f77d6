"""From a mask and places to a list of attention calls: which tokens in which order, which blocks, which inner masks."""

import itertools
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from manyformer.core import PADDING, Fronted, Packed, Place, Plain, tree_map
from manyformer.masks import Document, Mask, Not
from manyformer.masks.base import both, pick
from manyformer.ops.cover import Cover, Order, arrange, cover, groups, seen_at_all, span_of, visible
from manyformer.ops.spelled import marked, spell, spelled

# a pair of a query and a key in blocks of this size costs this much, against one in large blocks; measured
RATES = {64: 1.1, 128: 1.0, 256: 1.0}
MASKED = 0.1
"""A pair costs so much more where an inner mask is added to the scores."""
CALL = 8_000
"""One more call costs about as much as this many (query, key) pairs, forward and backward."""
MERGE = 12
"""Merging one token's output of two parts costs about as much as this many pairs."""
GATHER = 24
"""Collecting one key that a block of queries sees, and its gradient, costs about as much as this many pairs."""
CHOSEN = 7 / 8
"""Where a mask is about more than this share of all tokens, they are better left where they are than collected."""
BLOCK = 128
"""The block where searching for the best one would cost more than it gains."""
AT_ONCE = 1 << 20
"""Inner masks are written out for this many pairs at a time."""


class Tiles(NamedTuple):
    """Blocks of queries that see equally many blocks of keys.

    `step` says how the first key block moves from row to row where rows are neighbours and so are the key blocks of a
    row: then nothing has to be gathered. `inner` is the mask within the blocks where it is needed, of one row for
    all where all are alike; `blind` are its queries that see none of the keys.
    """

    rows: Int[Tensor, " n"]
    columns: Int[Tensor, "n m"]
    step: int | None
    inner: Bool[Tensor, "r c s"] | None
    blind: Bool[Tensor, "r c"] | None


class Part(NamedTuple):
    """Some queries, some keys, and who sees whom among them; no pair is in two parts."""

    mask: Mask
    q: Order
    k: Order
    tiles: tuple[Tiles, ...]

    @property
    def gathers(self) -> bool:
        """Whether some blocks of keys have to be collected."""
        return any(tiles.step is None for tiles in self.tiles)


class Lane(NamedTuple):
    """Heads that see the same."""

    heads: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def pairs(self) -> int:
        """How many (head, query, key) triples are computed."""
        blocks = ((part.q.size * part.k.size, tiles.columns.numel()) for part in self.parts for tiles in part.tiles)
        return len(self.heads) * sum(size * count for size, count in blocks)


class Plan(NamedTuple):
    """The calls for each row of the batch, or for all rows alike; `cost` in (head, query, key) triples a row."""

    rows: tuple[tuple[Lane, ...], ...]
    cost: float

    def pairs(self, batch: int) -> int:
        """How many (head, query, key) triples are computed for so many rows of a batch."""
        every = [sum(lane.pairs for lane in lanes) for lanes in self.rows]
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
def plan(mask: Mask, at: Place, of: Place, heads: int) -> Plan:
    """The calls for queries `at` and keys `of`, remembered for as long as these places can come again."""
    with torch.device("cpu"):
        return _plan(mask, at, of, heads)


def _plan(mask: Mask, at: Place, of: Place, heads: int) -> Plan:
    if spelled(at) and spelled(of):
        return _spelled(mask, heads, at.layout, of.layout, at.pos.shape[1], of.pos.shape[1])
    alone = at.seg is of.seg and not marked(at)
    if mask.causal and alone and isinstance(at.layout, Packed) and at.layout.right_padded:
        # no token sees padding on its right, so rows may as well be full
        return _spelled(mask, heads, Plain(), Plain(), at.pos.shape[1], at.pos.shape[1])
    if any(one is not other for one, other in zip(at, of)):
        return _by_row(mask, at, of, heads)
    known = _REMEMBERED.setdefault(at.seg, {})  # type: ignore[no-untyped-call]
    # role and part belong to the key because one set of segments may be asked about with several
    name = (mask, heads, id(at.pos), id(at.role), id(at.part))
    if name not in known:
        # kept with them, so that nothing else can come to have their ids
        known[name] = (_by_row(mask, at, of, heads), at.pos, at.role, at.part)
    return known[name][0]  # type: ignore[no-any-return]


_REMEMBERED: WeakIdKeyDictionary = WeakIdKeyDictionary()


@lru_cache(maxsize=64)
def _spelled(mask: Mask, heads: int, mine: Plain | Fronted, other: Plain | Fronted, queries: int, keys: int) -> Plan:
    at, of = (pick(spell(layout, length), 0) for layout, length in ((mine, queries), (other, keys)))
    lanes, cost = _lanes(mask, at, of, heads, tuple(RATES))
    return Plan((lanes,), cost)


def _by_row(mask: Mask, at: Place, of: Place, heads: int) -> Plan:
    at, of = (tree_map(lambda field: field.cpu(), place) for place in (at, of))
    batch = max(at.pos.shape[0], of.pos.shape[0])
    found = []
    for row in range(batch):
        one, other = (pick(place, row % place.pos.shape[0]) for place in (at, of))
        found.append(_lanes(mask, one, other, heads, (BLOCK,)))
    return Plan(tuple(lanes for lanes, _ in found), sum(cost for _, cost in found) / max(batch, 1))


def _words(part: Part) -> str:
    size = f"{part.q.size} x {part.k.size}"
    if part.q.natural and part.k.natural:
        return f"blocks of {size}"
    every = part.q.real == part.q.blocks.numel() and part.k.real == part.k.blocks.numel()
    return f"blocks of {size} among {'sorted' if every else 'chosen'} tokens"


def _lanes(mask: Mask, at: Place, of: Place, heads: int, sizes: tuple[int, ...]) -> tuple[tuple[Lane, ...], float]:
    kinds: dict[Mask, list[int]] = {}
    for head in range(heads):
        kinds.setdefault(mask.head(head), []).append(head)
    common = set[Mask].intersection(*(set(kind.terms()) for kind in kinds))

    # heads often differ in one term of many
    @cache
    def sketch(mask: Mask) -> list[Sketch]:
        return _sketch(mask, at, of, sizes)

    def rank(term: Mask) -> tuple[bool, int]:
        return term not in common, _reach(term, at, of)

    who: dict[int, list[int]] = {}
    found: dict[int, Sketch] = {}
    total = 0.0
    for kind, numbers in kinds.items():
        sketches = _best(kind, sorted(kind.terms(), key=rank), at, sketch)
        total += len(numbers) * _cost(sketches, at)
        for one in sketches:
            found[id(one)] = one
            who.setdefault(id(one), []).extend(numbers)
    lanes: dict[tuple[int, ...], list[Part]] = {}
    for name, numbers in who.items():
        lanes.setdefault(tuple(sorted(numbers)), []).append(found[name].finish(at, of))
    return tuple(Lane(numbers, tuple(parts)) for numbers, parts in lanes.items()), total


def _reach(term: Mask, at: Place, of: Place) -> int:
    """How many tokens a term is about: those about few come first, whole, and leave whole blocks to others or none.

    Where it is less than a block, others would be left with blocks that are all but whole: that is no gain.
    """
    few = min(int(_worth(one).sum()) for one in seen_at_all(term, at, of))
    return few if few >= min(RATES) else at.pos.shape[0]


class Sketch(NamedTuple):
    """A part before its inner masks are written out, and what it would cost a head."""

    mask: Mask
    q: Order
    k: Order
    cover: Cover
    cost: float

    def finish(self, at: Place, of: Place) -> Part:
        """The part with its calls."""
        return Part(self.mask, self.q, self.k, tuple(_tiles(self, at, of)))


def _best(mask: Mask, terms: list[Mask], at: Place, sketch: Callable[[Mask], list[Sketch]]) -> list[Sketch]:
    """The cheaper of one part for all, and of one part for each alternative, without what earlier ones show."""
    whole = sketch(mask)
    if len(terms) < 2:
        return whole
    parts: list[Sketch] = []
    for number, term in enumerate(terms):
        parts += sketch(reduce(both, [Not(other) for other in terms[:number]], term))
    return min(whole, parts, key=lambda sketches: _cost(sketches, at))


def _cost(sketches: list[Sketch], at: Place) -> float:
    merged = sum(sketch.q.real for sketch in sketches) - at.pos.shape[0]
    return sum((sketch.cost for sketch in sketches), 0.0) + MERGE * max(merged, 0)


def _sketch(mask: Mask, at: Place, of: Place, sizes: tuple[int, ...]) -> list[Sketch]:
    """The cheapest order and size of blocks for one mask; none where it shows nothing at all."""
    queries, keys = seen_at_all(mask, at, of)
    queries, keys = (_worth(one & (place.seg != PADDING)) for one, place in ((queries, at), (keys, of)))
    if not queries.any() or not keys.any():
        return []
    alike = bool((at.seg == at.seg[0]).all() and (of.seg == at.seg[0]).all())
    own = mask if alike else both(mask, Document())
    options = [
        _cut(own, at, of, queries, keys, period, size)
        for period, size in itertools.product((None, *sorted(mask.periods)), sizes)
    ]
    best = min(options, key=lambda sketch: sketch.cost)
    return [best] if len(best.cover.rows) else []


def _worth(chosen: Bool[Tensor, " l"]) -> Bool[Tensor, " l"]:
    """The same, or all tokens where that is little more."""
    return torch.ones_like(chosen) if chosen.sum() > CHOSEN * len(chosen) else chosen


def _cut(mask: Mask, at: Place, of: Place, queries: Tensor, keys: Tensor, period: int | None, size: int) -> Sketch:
    q = arrange(at, None if queries.all() else queries, period, size)
    k = arrange(of, None if keys.all() else keys, period, size)
    found = cover(mask, span_of(at, q.blocks, mask.periods), span_of(of, k.blocks, mask.periods))
    # the last block of keys is filled up with repetitions, which an inner mask must hide
    if k.real % k.size:
        found = found._replace(full=found.full & (found.columns != len(k.blocks) - 1))
    calls = list(groups(found, len(q.blocks)))
    gathered = k.size * sum(call.columns.numel() for call in calls if call.step is None)
    masked = sum(call.columns.numel() for call in calls if call.partial)
    pairs = (RATES[size] * len(found.rows) + MASKED * masked) * q.size * k.size
    return Sketch(mask, q, k, found, pairs + GATHER * gathered + CALL * len(calls))


def _tiles(sketch: Sketch, at: Place, of: Place) -> Iterator[Tiles]:
    for rows, columns, step, partial in groups(sketch.cover, len(sketch.q.blocks)):
        inner = _inner(sketch, at, of, rows, columns) if partial else None
        if inner is not None and not inner.any():
            continue
        blind = None if inner is None or inner.any(-1).all() else ~inner.any(-1)
        yield Tiles(rows, columns, step, inner, blind)


def _inner(sketch: Sketch, at: Place, of: Place, rows: Tensor, columns: Tensor) -> Bool[Tensor, "r c s"]:
    """The mask within the blocks; a single one where all rows have the same."""
    q, k = sketch.q, sketch.k
    real = (torch.arange(k.blocks.numel()) < k.real).view_as(k.blocks)
    chunk = max(AT_ONCE // (q.size * columns.shape[1] * k.size), 1)
    pieces: list[Tensor] = []
    alike = True
    for row, column in zip(torch.split(rows, chunk), torch.split(columns, chunk)):
        seen = visible(sketch.mask, at, of, q.blocks[row], k.blocks[column].flatten(1))
        seen = seen & real[column].flatten(1)[:, None, :]
        alike = alike and bool((seen == (pieces[0][:1] if pieces else seen[:1])).all())
        pieces.append(seen)
    return pieces[0][:1].clone() if alike else torch.cat(pieces)
