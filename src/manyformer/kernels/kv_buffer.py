"""Keys and values of many tokens for later, first in first out and without gradients, and who may see which."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, AlignedLayout, ContiguousLayout, PackedLayout, TokenPositions

UNUSED = -2
"""The segment number of a column that holds nothing yet."""

LEAST_ROOM = 16


class KVBuffer(NamedTuple):
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
    def used(self) -> "KVBuffer":
        """The same without unused columns: views."""
        here = slice(self.begin, self.end)
        pos, seg = self.pos[:, here], self.seg[:, here]
        return KVBuffer(self.k[:, :, here], self.v[:, :, here], pos, seg, 0, self.end - self.begin)


class BlockHistory(NamedTuple):
    """Who sees what: tokens of a document come in blocks of `block`; a block sees the last `size` tokens before it.

    That is a function of positions, so that it does not matter in which pieces a text is read.
    """

    size: int
    block: int

    @property
    def needed(self) -> int:
        """The last so many tokens of a document are what its next token, and all after it, may see."""
        return self.size + self.block - 1

    def hidden(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Bool[Tensor, "b l s"]:
        """The definition: which keys a query must not see."""
        first = (query_positions.position_ids // self.block * self.block)[:, :, None]
        seen = (key_positions.position_ids[:, None] < first) & (
            key_positions.position_ids[:, None] >= first - self.size
        )
        return ~(
            seen
            & (query_positions.segment_ids[:, :, None] == key_positions.segment_ids[:, None])
            & (key_positions.segment_ids[:, None] != PADDING_SEGMENT)
        )

    def nothing(self, query_positions: TokenPositions) -> bool:
        """Whether it is known without a look at numbers that no query sees anything."""
        return (
            isinstance(query_positions.layout, ContiguousLayout)
            and query_positions.layout.start + query_positions.position_ids.shape[1] <= self.block
        )


class SharedKeyRange(NamedTuple):
    """Queries of some rows that see the same keys, and all of these."""

    rows: slice
    queries: slice
    keys: slice


def shared_key_ranges(
    sight: BlockHistory, query_positions: TokenPositions, keys: int
) -> Iterator[SharedKeyRange] | None:
    """Who sees which of `keys` columns, `query_positions` the last of them; None where tokens may not stand side by
    side.
    """
    queries = query_positions.position_ids.shape[1]
    if isinstance(query_positions.layout, ContiguousLayout):
        return _in_row(sight, slice(None), (0, queries, query_positions.layout.start), keys, queries)
    if isinstance(query_positions.layout, PackedLayout) and keys == queries:
        documents = query_positions.layout.documents
        return (s for r, a, b in documents for s in _in_row(sight, slice(r, r + 1), (a, b, 0), keys, queries))
    if not isinstance(query_positions.layout, AlignedLayout) or query_positions.position_ids.device.type != "cpu":
        return None
    return _in_rows(sight, query_positions, keys)


def _in_rows(sight: BlockHistory, query_positions: TokenPositions, keys: int) -> Iterator[SharedKeyRange]:
    pos, seg = query_positions.position_ids.numpy(), query_positions.segment_ids.numpy()
    for row in range(len(seg)):
        cuts = [0, *(np.flatnonzero(np.diff(seg[row])) + 1).tolist(), seg.shape[1]]
        for begin, end in itertools.pairwise(cuts):
            if seg[row, begin] != PADDING_SEGMENT:
                document = begin, end, int(pos[row, begin])
                yield from _in_row(sight, slice(row, row + 1), document, keys, seg.shape[1])


def _in_row(
    sight: BlockHistory, rows: slice, document: tuple[int, int, int], keys: int, queries: int
) -> Iterator[SharedKeyRange]:
    """Of a document that reaches from one query to before another, the first one at a position."""
    begin, end, first = document
    # the column of the document's token 0
    origin = keys - queries + begin - first
    for edge in range(first // sight.block * sight.block, first + end - begin, sight.block):
        here = slice(max(begin, begin + edge - first), min(end, begin + edge + sight.block - first))
        seen = slice(max(origin + max(0, edge - sight.size), 0), origin + edge)
        if seen.start < seen.stop:
            yield SharedKeyRange(rows, here, seen)


def empty_buffer(batch: int, heads: int, key: int, value: int, *, device: torch.device, dtype: torch.dtype) -> KVBuffer:
    """Nothing yet, and room for nothing."""
    k, v = (torch.zeros(batch, heads, 0, width, device=device, dtype=dtype) for width in (key, value))
    pos = torch.zeros(batch, 0, dtype=torch.long, device=device)
    return KVBuffer(k, v, pos, pos)


@torch.no_grad()
def append(
    store: KVBuffer, k: Float[Tensor, "b h l e"], v: Float[Tensor, "b h l f"], positions: TokenPositions, keep: int
) -> KVBuffer:
    """The store with these tokens behind the others; what is not among the last `keep` of a document may go first."""
    count = k.shape[2]
    if not _free(store, count):
        store = _moved(store, count, keep)
    here = slice(store.end, store.end + count)
    for part, new in ((store.k, k), (store.v, v)):
        part[:, :, here] = new
    for part, number in ((store.pos, positions.position_ids), (store.seg, positions.segment_ids)):
        part[:, here] = number
    return store._replace(end=here.stop)


def trim(store: KVBuffer, positions: TokenPositions, keep: int) -> KVBuffer:
    """Without columns that no later token needs, where that is known without a look at them."""
    if not isinstance(positions.layout, ContiguousLayout | AlignedLayout):
        return store
    return store._replace(begin=max(store.begin, store.end - keep))


def _free(store: KVBuffer, count: int) -> bool:
    """Whether the next columns are there, and nobody has gone on from this state before."""
    if store.end + count > store.seg.shape[1] or (store.k.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    # without numbers there is nobody else
    return store.seg.is_meta or count == 0 or bool((store.seg[:, store.end] == UNUSED).all())


def _moved(store: KVBuffer, count: int, keep: int) -> KVBuffer:
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
    return KVBuffer(k, v, moved(store.pos, 1, 0), moved(store.seg, 1, UNUSED), 0, held)


def _first_needed(store: KVBuffer, keep: int) -> int:
    """The first column that the next token of some row, going on with its document, may need."""
    used = store.used
    if used.end <= keep or used.seg.is_meta:
        return store.begin
    real = used.seg != PADDING_SEGMENT
    last = torch.where(real, torch.arange(used.end, device=real.device), 0).amax(1, keepdim=True)
    same = real & (used.seg == used.seg.gather(1, last))
    needed = (same & (used.pos > used.pos.gather(1, last) - keep)).any(0)
    return store.begin + int(needed.byte().argmax())
