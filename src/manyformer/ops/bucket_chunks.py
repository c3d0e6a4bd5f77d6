"""Tokens sorted by bucket and split into chunks: the slot of each token, and which chunks attend to each other.

Tokens are numbered across all rows: token t of row n is n * l + t. Where rows are heads, the tokens of each position
are adjacent for every `interleaved_heads` heads, as projections lay them out. A unit is what starts a new chunk: a
document, as published, or a bucket of a document, so that no later token moves the border of a chunk.
"""

from collections import Counter
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout, TokenPositions
from manyformer.device_reads import reads_are_free

ChunkUnit = Literal["document", "bucket"]

MAX_BUCKETS = 1 << 24
"""An upper bound of the number of buckets: document * MAX_BUCKETS + bucket sorts by document, then by bucket."""


class BucketChunks(NamedTuple):
    """Token indices per chunk, -1 for empty slots, and for each token its slot, bucket, mark and rank.

    `bucket` numbers the buckets of all documents. `mark` numbers the chunks of a row so that those of other buckets are
    far away: a token may attend to another one of its row if their marks differ by at most lookback or lookahead
    chunks. `rank` counts the earlier tokens of the unit. Padding is in no chunk; its slot is one after the last.
    """

    tokens: Int[Tensor, "c m"]
    slot: Int[Tensor, " n"]
    bucket: Int[Tensor, " n"]
    mark: Int[Tensor, " n"]
    rank: Int[Tensor, " n"]


def sort_into_chunks(
    bucket: Int[Tensor, "n l"],
    segment_ids: Int[Tensor, "n l"],
    size: int,
    *,
    unit: ChunkUnit,
    reach: int,
    interleaved_heads: int = 1,
    max_units: int | None = None,
) -> BucketChunks:
    """Sort each row by document and bucket, stably, and split every unit into chunks of `size` tokens.

    `reach` is lookback plus lookahead, in chunks. Where a row has at most `max_units` units, a device need not tell
    the host how many chunks there are: it has as many as there could be, of which the last ones are empty.
    """
    length = bucket.shape[1]
    column = torch.arange(length, device=bucket.device)
    # the padding segment has the lowest number but must sort last
    document = torch.where(segment_ids == PADDING_SEGMENT, torch.iinfo(torch.int32).max, segment_ids)
    sort_key, order = (document * MAX_BUCKETS + bucket).sort(dim=1, stable=True)
    document = document.gather(1, order)
    valid = document != torch.iinfo(torch.int32).max
    bucket_starts = _run_starts(sort_key)
    if unit == "bucket":
        unit_starts = bucket_starts
    else:
        unit_starts = _run_starts(document)
    rank = column - torch.where(unit_starts, column, 0).cummax(1).values
    starts = (rank % size == 0) & valid
    chunk = starts.flatten().cumsum(0) - 1
    count = _chunk_count(chunk.view(bucket.shape), size, max_units)
    slot = torch.where(valid.flatten(), chunk * size + rank.flatten() % size, count * size)
    bucket_ids = bucket_starts.flatten().cumsum(0)
    mark = (chunk + (reach + 1) * bucket_ids).view(order.shape)
    # relative to the row's first mark: small integers are exact in every floating-point type
    mark = (mark - mark[:, :1]).flatten()
    row = torch.arange(len(order), device=order.device)[:, None]
    token = ((row // interleaved_heads * length + order) * interleaved_heads + row % interleaved_heads).flatten()
    tokens = torch.full((count * size + 1,), -1, device=token.device).scatter_(0, slot, token)[:-1]
    sorted_fields = (slot, bucket_ids, mark, rank.flatten())
    slot, bucket_ids, mark, rank = (torch.empty_like(token).scatter_(0, token, x) for x in sorted_fields)
    return BucketChunks(tokens.view(count, size), slot, bucket_ids.int(), mark.int(), rank)


def units_per_row(positions: TokenPositions, unit: ChunkUnit, buckets: int) -> int | None:
    """The most units that a row has according to its layout; None where that says nothing."""
    if isinstance(positions.layout, ContiguousLayout):
        documents = 1
    elif isinstance(positions.layout, PackedLayout):
        documents = max(Counter(row for row, _, _ in positions.layout.documents).values(), default=0)
    else:
        return None
    if unit == "bucket":
        return documents * buckets
    return documents


def _chunk_count(chunk: Int[Tensor, "n l"], size: int, max_units: int | None) -> int:
    """The number of chunks, of which `chunk` counts those up to each token; read, or bounded where that is slow."""
    if not chunk.numel():
        return 0
    if max_units is None or reads_are_free(chunk):
        return int(chunk[-1, -1]) + 1
    rows, length = chunk.shape
    return rows * ((length + min(max_units, length) * (size - 1)) // size)


def document_lengths(segment_ids: Int[Tensor, "n l"]) -> Int[Tensor, "n l"]:
    """The length of each token's document."""
    sorted_ids, order = segment_ids.sort(dim=1)
    document = _run_starts(sorted_ids).flatten().cumsum(0) - 1
    counts = torch.zeros_like(document).scatter_add_(0, document, torch.ones_like(document))
    return torch.empty_like(order).scatter_(1, order, counts[document].view(order.shape))


def same_or_adjacent(
    query_marks: Int[Tensor, "..."], key_marks: Int[Tensor, "..."], lookback: int, lookahead: int
) -> Bool[Tensor, "..."]:
    """Whether the marks of two tokens differ by at most `lookback` or `lookahead` chunks."""
    distance = query_marks - key_marks
    return (distance <= lookback) & (distance >= -lookahead)


def _run_starts(x: Int[Tensor, "n l"]) -> Bool[Tensor, "n l"]:
    """Where a row's value differs from the previous one, and at the row's start."""
    starts = torch.ones_like(x, dtype=torch.bool)
    starts[:, 1:] = x[:, 1:] != x[:, :-1]
    return starts
