"""Tokens sorted by bucket and cut into chunks: which token lies where, and which chunks see each other.

Tokens are numbered through all rows: number t of row n is n * l + t. Where rows are heads, as many as are `beside` each
other have the tokens of one place one after the other, as projections leave them. A unit is what begins with a chunk of
its own: a document, as published, or a bucket of a document, so that nothing later moves the border of a chunk.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT

ChunkUnit = Literal["document", "bucket"]

ROOM = 1 << 24
"""More buckets than anybody has: documents times this many and buckets sort as pairs."""


class BucketChunks(NamedTuple):
    """Tokens in chunks, -1 where a chunk is not full; the slot of each token; and what is known of each token.

    `bucket` numbers the buckets of all documents. `mark` numbers the chunks of a row so that those of other buckets are
    far away: a token sees another one of its row if their marks differ by no more chunks than it looks back or ahead.
    `rank` counts the earlier tokens of the unit. Padding lies in no chunk; its slot is one after the last.
    """

    tokens: Int[Tensor, "c m"]
    slot: Int[Tensor, " n"]
    bucket: Int[Tensor, " n"]
    mark: Int[Tensor, " n"]
    rank: Int[Tensor, " n"]


def sort_into_chunks(
    bucket: Int[Tensor, "n l"], seg: Int[Tensor, "n l"], size: int, *, unit: ChunkUnit, reach: int, beside: int = 1
) -> BucketChunks:
    """Sort each row by document and bucket, keeping the order of tokens, and cut every unit into chunks of `size`.

    `reach` is how many chunks a token looks back and ahead together.
    """
    length = bucket.shape[1]
    column = torch.arange(length, device=bucket.device)
    # padding, whose number is the lowest, comes last
    document = torch.where(seg == PADDING_SEGMENT, torch.iinfo(torch.int32).max, seg)
    code, order = (document * ROOM + bucket).sort(dim=1, stable=True)
    document = document.gather(1, order)
    real = document != torch.iinfo(torch.int32).max
    turns = _changes(code)
    begins = turns if unit == "bucket" else _changes(document)
    rank = column - torch.where(begins, column, 0).cummax(1).values
    starts = (rank % size == 0) & real
    chunk = starts.flatten().cumsum(0) - 1
    count = int(chunk[-1]) + 1 if len(chunk) else 0
    slot = torch.where(real.flatten(), chunk * size + rank.flatten() % size, count * size)
    number = turns.flatten().cumsum(0)
    mark = (chunk + (reach + 1) * number).view(order.shape)
    # from the beginning of the row: small numbers are exact in any form
    mark = (mark - mark[:, :1]).flatten()
    row = torch.arange(len(order), device=order.device)[:, None]
    token = ((row // beside * length + order) * beside + row % beside).flatten()
    tokens = torch.full((count * size + 1,), -1, device=token.device).scatter_(0, slot, token)[:-1]
    known = (slot, number, mark, rank.flatten())
    slot, number, mark, rank = (torch.empty_like(token).scatter_(0, token, x) for x in known)
    return BucketChunks(tokens.view(count, size), slot, number.int(), mark.int(), rank)


def document_lengths(seg: Int[Tensor, "n l"]) -> Int[Tensor, "n l"]:
    """How many tokens the document of each token has."""
    numbers, order = seg.sort(dim=1)
    document = _changes(numbers).flatten().cumsum(0) - 1
    counted = torch.zeros_like(document).scatter_add_(0, document, torch.ones_like(document))
    return torch.empty_like(order).scatter_(1, order, counted[document].view(order.shape))


def same_or_adjacent(
    mark: Int[Tensor, "..."], other: Int[Tensor, "..."], before: int, after: int
) -> Bool[Tensor, "..."]:
    """Whether tokens with the first marks see those with the other ones."""
    apart = mark - other
    return (apart <= before) & (apart >= -after)


def _changes(x: Int[Tensor, "n l"]) -> Bool[Tensor, "n l"]:
    """Where a row's number differs from the one before, and at its beginning."""
    found = torch.ones_like(x, dtype=torch.bool)
    found[:, 1:] = x[:, 1:] != x[:, :-1]
    return found
