"""Keys and values of many tokens for later, first in first out and without gradients, and who may see which."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import PADDING, Lined, Packed, Place, Plain

UNUSED = -2
"""The segment number of a column that holds nothing yet."""

LEAST_ROOM = 16


class Store(NamedTuple):
    """Pairs of key and value in the columns from `begin` to before `end` of a buffer, and where their tokens are.

    A buffer is written in place, but only where nothing was: every state stays as it was. Columns of padding are there,
    but nobody sees them.
    """

    k: Float[Tensor, "b h room e"]
    v: Float[Tensor, "b h room f"]
    pos: Int[Tensor, "b room"]
    seg: Int[Tensor, "b room"]
    begin: int = 0
    end: int = 0

    @property
    def used(self) -> "Store":
        """The same without unused columns: views."""
        here = slice(self.begin, self.end)
        pos, seg = self.pos[:, here], self.seg[:, here]
        return Store(self.k[:, :, here], self.v[:, :, here], pos, seg, 0, self.end - self.begin)


class Sight(NamedTuple):
    """Who sees what: tokens of a document come in blocks of `block`; a block sees the last `size` tokens before it.

    That is a function of positions, so that it does not matter in which pieces a text is read.
    """

    size: int
    block: int

    @property
    def needed(self) -> int:
        """The last so many tokens of a document are what its next token, and all after it, may see."""
        return self.size + self.block - 1

    def hidden(self, at: Place, of: Place) -> Bool[Tensor, "b l s"]:
        """The definition: which keys a query must not see."""
        first = (at.pos // self.block * self.block)[:, :, None]
        seen = (of.pos[:, None] < first) & (of.pos[:, None] >= first - self.size)
        return ~(seen & (at.seg[:, :, None] == of.seg[:, None]) & (of.seg[:, None] != PADDING))

    def nothing(self, at: Place) -> bool:
        """Whether it is known without a look at numbers that no query sees anything."""
        return isinstance(at.layout, Plain) and at.layout.start + at.pos.shape[1] <= self.block


class Stretch(NamedTuple):
    """Queries of some rows that see the same keys, and all of these."""

    rows: slice
    queries: slice
    keys: slice


def stretches(sight: Sight, at: Place, keys: int) -> Iterator[Stretch] | None:
    """Who sees which of `keys` columns, `at` the last of them; None where tokens may not stand side by side."""
    queries = at.pos.shape[1]
    if isinstance(at.layout, Plain):
        return _in_row(sight, slice(None), (0, queries, at.layout.start), keys, queries)
    if isinstance(at.layout, Packed) and keys == queries:
        documents = at.layout.documents
        return (s for r, a, b in documents for s in _in_row(sight, slice(r, r + 1), (a, b, 0), keys, queries))
    if not isinstance(at.layout, Lined) or at.pos.device.type != "cpu":
        return None
    return _in_rows(sight, at, keys)


def _in_rows(sight: Sight, at: Place, keys: int) -> Iterator[Stretch]:
    pos, seg = at.pos.numpy(), at.seg.numpy()
    for row in range(len(seg)):
        cuts = [0, *(np.flatnonzero(np.diff(seg[row])) + 1).tolist(), seg.shape[1]]
        for begin, end in itertools.pairwise(cuts):
            if seg[row, begin] != PADDING:
                document = begin, end, int(pos[row, begin])
                yield from _in_row(sight, slice(row, row + 1), document, keys, seg.shape[1])


def _in_row(sight: Sight, rows: slice, document: tuple[int, int, int], keys: int, queries: int) -> Iterator[Stretch]:
    """Of a document that reaches from one query to before another, the first one at a position."""
    begin, end, first = document
    # the column of the document's token 0
    origin = keys - queries + begin - first
    for edge in range(first // sight.block * sight.block, first + end - begin, sight.block):
        here = slice(max(begin, begin + edge - first), min(end, begin + edge + sight.block - first))
        seen = slice(max(origin + max(0, edge - sight.size), 0), origin + edge)
        if seen.start < seen.stop:
            yield Stretch(rows, here, seen)


def empty(batch: int, heads: int, key: int, value: int, *, device: torch.device, dtype: torch.dtype) -> Store:
    """Nothing yet, and room for nothing."""
    k, v = (torch.zeros(batch, heads, 0, width, device=device, dtype=dtype) for width in (key, value))
    pos = torch.zeros(batch, 0, dtype=torch.long, device=device)
    return Store(k, v, pos, pos)


@torch.no_grad()
def appended(store: Store, k: Float[Tensor, "b h l e"], v: Float[Tensor, "b h l f"], place: Place, keep: int) -> Store:
    """The store with these tokens behind the others; what is not among the last `keep` of a document may go first."""
    count = k.shape[2]
    if not _free(store, count):
        store = _moved(store, count, keep)
    here = slice(store.end, store.end + count)
    for part, new in ((store.k, k), (store.v, v)):
        part[:, :, here] = new
    for part, number in ((store.pos, place.pos), (store.seg, place.seg)):
        part[:, here] = number
    return store._replace(end=here.stop)


def trimmed(store: Store, place: Place, keep: int) -> Store:
    """Without columns that no later token needs, where that is known without a look at them."""
    if not isinstance(place.layout, Plain | Lined):
        return store
    return store._replace(begin=max(store.begin, store.end - keep))


def _free(store: Store, count: int) -> bool:
    """Whether the next columns are there, and nobody has gone on from this state before."""
    if store.end + count > store.seg.shape[1] or (store.k.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    # without numbers there is nobody else
    return store.seg.is_meta or count == 0 or bool((store.seg[:, store.end] == UNUSED).all())


def _moved(store: Store, count: int, keep: int) -> Store:
    """What may still be seen in a new buffer, with room for `count` tokens and half as many as it holds."""
    begin = _first_needed(store, keep)
    held = store.end - begin
    room = held + max(count, held // 2, LEAST_ROOM)

    def moved(part: Tensor, axis: int, fill: int) -> Tensor:
        shape = [*part.shape[:axis], room, *part.shape[axis + 1 :]]
        fresh = part.new_full(shape, fill)
        fresh.narrow(axis, 0, held).copy_(part.narrow(axis, begin, held))
        return fresh

    k, v = (moved(part, 2, 0) for part in (store.k, store.v))
    return Store(k, v, moved(store.pos, 1, 0), moved(store.seg, 1, UNUSED), 0, held)


def _first_needed(store: Store, keep: int) -> int:
    """The first column that the next token of some row, going on with its document, may need."""
    used = store.used
    if used.end <= keep or used.seg.is_meta:
        return store.begin
    real = used.seg != PADDING
    last = torch.where(real, torch.arange(used.end, device=real.device), 0).amax(1, keepdim=True)
    same = real & (used.seg == used.seg.gather(1, last))
    needed = (same & (used.pos > used.pos.gather(1, last) - keep)).any(0)
    return store.begin + int(needed.byte().argmax())
