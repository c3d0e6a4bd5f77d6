"""A first-in-first-out buffer of keys and values without gradients, and the visibility of its columns."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.nn.core import PADDING_SEGMENT, AlignedLayout, ContiguousLayout, PackedLayout, TokenPositions
from manyformer.nn.runtime.device_reads import is_readable

UNUSED_SEGMENT = -2
"""The segment id of a column that has not been written yet."""

MIN_CAPACITY = 16
"""The smallest number of free columns in a new buffer."""


class KVBuffer(NamedTuple):
    """Keys and values in the columns `start` to `stop` of a buffer, with the positions of their tokens.

    The buffer is written in place, but only in unused columns, so earlier states stay valid. Padding has columns too;
    no query sees them.
    """

    k: Float[Tensor, "b h capacity e"]
    v: Float[Tensor, "b h capacity f"]
    position_ids: Int[Tensor, "b capacity"]
    segment_ids: Int[Tensor, "b capacity"]
    start: int = 0
    stop: int = 0

    @property
    def used(self) -> "KVBuffer":
        """The used columns as views."""
        columns = slice(self.start, self.stop)
        k = self.k[:, :, columns]
        v = self.v[:, :, columns]
        position_ids = self.position_ids[:, columns]
        segment_ids = self.segment_ids[:, columns]
        return KVBuffer(k, v, position_ids, segment_ids, 0, self.stop - self.start)


class BlockHistory(NamedTuple):
    """Visibility of earlier tokens: documents are divided into blocks of `block` tokens, and the tokens of a block see
    the last `size` tokens before the block.

    It depends on positions alone, so the division of a text into calls does not matter.
    """

    size: int
    block: int

    @property
    def required_tokens(self) -> int:
        """How many of the last tokens of a document its later tokens may still see."""
        return self.size + self.block - 1

    def masked_keys(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Bool[Tensor, "b l s"]:
        """The definition: the keys that each query must not see."""
        block_starts = (query_positions.position_ids // self.block * self.block)[:, :, None]
        key_ids = key_positions.position_ids[:, None]
        visible = (key_ids < block_starts) & (key_ids >= block_starts - self.size)
        return ~(visible & query_positions.same_document(key_positions))

    def has_no_visible_keys(self, query_positions: TokenPositions) -> bool:
        """Whether the layout alone shows that no query sees any key."""
        return (
            isinstance(query_positions.layout, ContiguousLayout)
            and query_positions.layout.start + query_positions.position_ids.shape[1] <= self.block
        )


class SharedKeyRange(NamedTuple):
    """Queries of some rows that all see the same range of keys."""

    rows: slice
    queries: slice
    keys: slice


def shared_key_ranges(
    history: BlockHistory, query_positions: TokenPositions, keys: int
) -> Iterator[SharedKeyRange] | None:
    """The ranges of queries that see the same of `keys` columns; `query_positions` are the last of those columns.

    None where the tokens of a document may not be contiguous.
    """
    queries = query_positions.position_ids.shape[1]
    if isinstance(query_positions.layout, ContiguousLayout):
        return _ranges_of_document(history, slice(None), (0, queries, query_positions.layout.start), keys, queries)
    if isinstance(query_positions.layout, PackedLayout) and keys == queries:
        documents = query_positions.layout.documents
        return (
            s for r, a, b in documents for s in _ranges_of_document(history, slice(r, r + 1), (a, b, 0), keys, queries)
        )
    if not isinstance(query_positions.layout, AlignedLayout) or not is_readable(query_positions.position_ids):
        return None
    return _ranges_of_rows(history, query_positions, keys)


def _ranges_of_rows(history: BlockHistory, query_positions: TokenPositions, keys: int) -> Iterator[SharedKeyRange]:
    position_ids = query_positions.position_ids.numpy()
    segment_ids = query_positions.segment_ids.numpy()
    for row in range(len(segment_ids)):
        cuts = [0, *(np.flatnonzero(np.diff(segment_ids[row])) + 1).tolist(), segment_ids.shape[1]]
        for start, stop in itertools.pairwise(cuts):
            if segment_ids[row, start] != PADDING_SEGMENT:
                document = start, stop, int(position_ids[row, start])
                yield from _ranges_of_document(history, slice(row, row + 1), document, keys, segment_ids.shape[1])


def _ranges_of_document(
    history: BlockHistory, rows: slice, document: tuple[int, int, int], keys: int, queries: int
) -> Iterator[SharedKeyRange]:
    """The ranges of one document, given as its first query column, its stop column and its first position."""
    start, stop, first_position = document
    # the key column of the document's token at position 0
    origin = keys - queries + start - first_position
    shift = start - first_position
    for block_start in range(first_position // history.block * history.block, stop - shift, history.block):
        query_columns = slice(max(start, block_start + shift), min(stop, block_start + history.block + shift))
        key_columns = slice(max(origin + max(0, block_start - history.size), 0), origin + block_start)
        if key_columns.start < key_columns.stop:
            yield SharedKeyRange(rows, query_columns, key_columns)


def empty_buffer(
    batch: int, heads: int, key_dim: int, value_dim: int, *, device: torch.device, dtype: torch.dtype
) -> KVBuffer:
    """A buffer without tokens and without capacity."""
    k, v = (torch.zeros(batch, heads, 0, width, device=device, dtype=dtype) for width in (key_dim, value_dim))
    position_ids = torch.zeros(batch, 0, dtype=torch.long, device=device)
    return KVBuffer(k, v, position_ids, position_ids)


@torch.no_grad()
def append(
    buffer: KVBuffer, k: Float[Tensor, "b h l e"], v: Float[Tensor, "b h l f"], positions: TokenPositions, keep: int
) -> KVBuffer:
    """Append tokens; tokens that are not among the last `keep` of a document may be evicted."""
    count = k.shape[2]
    if not _can_append_in_place(buffer, count):
        buffer = _reallocate(buffer, count, keep)
    columns = slice(buffer.stop, buffer.stop + count)
    for field, new in ((buffer.k, k), (buffer.v, v)):
        field[:, :, columns] = new
    for field, ids in ((buffer.position_ids, positions.position_ids), (buffer.segment_ids, positions.segment_ids)):
        field[:, columns] = ids
    return buffer._replace(stop=columns.stop)


def trim(buffer: KVBuffer, positions: TokenPositions, keep: int) -> KVBuffer:
    """Drop columns that no later token needs, where the layout alone shows which these are."""
    if not isinstance(positions.layout, ContiguousLayout | AlignedLayout):
        return buffer
    return buffer._replace(start=max(buffer.start, buffer.stop - keep))


def _can_append_in_place(buffer: KVBuffer, count: int) -> bool:
    """Whether the next columns exist and no other call has already continued from this state."""
    # tensors made in inference mode may not be written outside of it
    is_frozen = buffer.k.is_inference() and not torch.is_inference_mode_enabled()
    if is_frozen or buffer.stop + count > buffer.segment_ids.shape[1]:
        return False
    # meta tensors have no values, so no other call can have written them
    is_next_unused = buffer.segment_ids.is_meta or count == 0
    return is_next_unused or bool((buffer.segment_ids[:, buffer.stop] == UNUSED_SEGMENT).all())


def _reallocate(buffer: KVBuffer, count: int, keep: int) -> KVBuffer:
    """Copy the required columns to a new buffer with capacity for `count`, or half its length, more tokens."""
    start = _first_required_column(buffer, keep)
    length = buffer.stop - start
    capacity = length + max(count, length // 2, MIN_CAPACITY)

    def copy_field(field: Tensor, axis: int, fill: int) -> Tensor:
        shape = [*field.shape[:axis], capacity, *field.shape[axis + 1 :]]
        resized = field.new_full(shape, fill)
        # the rest stays marked as unused, which is how a later call knows that it may write there
        resized.narrow(axis, 0, length).copy_(field.narrow(axis, start, length))
        return resized

    k, v = (copy_field(part, 2, 0) for part in (buffer.k, buffer.v))
    position_ids = copy_field(buffer.position_ids, 1, 0)
    segment_ids = copy_field(buffer.segment_ids, 1, UNUSED_SEGMENT)
    return KVBuffer(k, v, position_ids, segment_ids, 0, length)


def _first_required_column(buffer: KVBuffer, keep: int) -> int:
    """The first column that the next token of any row may need if it continues the row's last document."""
    used = buffer.used
    if used.stop <= keep or used.segment_ids.is_meta:
        return buffer.start
    valid = used.segment_ids != PADDING_SEGMENT
    # the last token of each row, whatever padding follows it
    last = torch.where(valid, torch.arange(used.stop, device=valid.device), 0).amax(1, keepdim=True)
    last_document = valid & (used.segment_ids == used.segment_ids.gather(1, last))
    required = (last_document & (used.position_ids > used.position_ids.gather(1, last) - keep)).any(0)
    return buffer.start + int(required.byte().argmax())
