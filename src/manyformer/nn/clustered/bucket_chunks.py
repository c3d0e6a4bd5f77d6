"""Tokens sorted by bucket and split into chunks, and attention within groups of tokens, such as clusters of keys.

Tokens are numbered across all rows: token t of row n is n * l + t. Where rows are heads, the tokens of each position
are adjacent for every `interleaved_heads` heads, as projections lay them out. A unit is what starts a new chunk: a
document, as published, or a bucket of a document, so that no later token moves the border of a chunk. In groups,
queries are the keys of the same tokens; a token's own key, which is the most similar to its query, is visible only
where no other one is.
"""

from collections import Counter
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout, TokenPositions
from manyformer.nn.ops import softmax_attention
from manyformer.nn.runtime.device_reads import count_values, reads_are_free

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
    # sorted by document and bucket, so that each is one run of its row
    bucket_starts = _run_starts(sort_key)
    if unit == "bucket":
        unit_starts = bucket_starts
    else:
        unit_starts = _run_starts(document)
    rank = column - torch.where(unit_starts, column, 0).cummax(1).values
    starts = (rank % size == 0) & valid
    chunk = starts.flatten().cumsum(0) - 1
    count = _chunk_count(chunk.view(bucket.shape), size, max_units)
    # ranks count from the start of a unit, so that the last chunk of a unit may be partly empty
    slot = torch.where(valid.flatten(), chunk * size + rank.flatten() % size, count * size)
    bucket_ids = bucket_starts.flatten().cumsum(0)
    # every new bucket skips more numbers than a token can reach
    mark = (chunk + (reach + 1) * bucket_ids).view(order.shape)
    # relative to the row's first mark: small integers are exact in every floating-point type
    mark = (mark - mark[:, :1]).flatten()
    row = torch.arange(order.shape[0], device=order.device)[:, None]
    token = ((row // interleaved_heads * length + order) * interleaved_heads + row % interleaved_heads).flatten()
    tokens = torch.full((count * size + 1,), -1, device=token.device).scatter(0, slot, token)[:-1]
    sorted_fields = (slot, bucket_ids, mark, rank.flatten())
    slot, bucket_ids, mark, rank = (torch.empty_like(token).scatter(0, token, x) for x in sorted_fields)
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
    counts = torch.zeros_like(document).scatter_add(0, document, torch.ones_like(document))
    return torch.empty_like(order).scatter(1, order, counts[document].view(order.shape))


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


def ranks(group: Int[Tensor, "*b s"], last: int) -> Int[Tensor, "*b l"]:
    """Rank of each of the `last` tokens within its group: the number of earlier tokens of that group."""
    column = torch.arange(group.shape[-1], device=group.device)
    queries = column[group.shape[-1] - last :, None]
    return ((group[..., group.shape[-1] - last :, None] == group[..., None, :]) & (column < queries)).sum(-1)


def visible_members(
    group: Int[Tensor, "b h s"], rank: Int[Tensor, "b h s"], size: int, last: int
) -> Bool[Tensor, "b h l s"]:
    """Mask of the keys visible to the `last` tokens, with each group split into chunks of `size`.

    A token sees earlier tokens of its chunk and of the previous one, or its own key where there are none.
    """
    start = group.shape[-1] - last
    same_group = group[..., start:, None] == group[..., None, :]
    chunk = rank // size
    chunk_distance = chunk[..., start:, None] - chunk[..., None, :]
    # a distance above 0 is of an earlier chunk; one below 0 would be later, which the ranks exclude
    earlier = same_group & (rank[..., None, :] < rank[..., start:, None]) & (chunk_distance <= 1)
    return fall_back_to_self(earlier, torch.eye(group.shape[-1], dtype=torch.bool, device=group.device)[start:])


def fall_back_to_self(visible: Bool[Tensor, "*b l s"], self_mask: Bool[Tensor, "*#b l s"]) -> Bool[Tensor, "*b l s"]:
    """The mask `visible`, with `self_mask` added in the rows that have no visible key."""
    return visible | (self_mask & ~visible.any(-1, keepdim=True))


def balanced_attention(
    k: Float[Tensor, "b h s e"], v: Float[Tensor, "b h s f"], members: Int[Tensor, "b h k w"], *, scale: float
) -> Float[Tensor, "b h s f"]:
    """Attention of each group's members to earlier members, averaged over the groups that a token is in.

    The members of a group are sorted; the index `s` stands for no token and comes last. Tokens in no group get zeros.
    """
    size = members.shape[3]
    length = k.shape[2]
    row = torch.arange(k.shape[0] * k.shape[1], device=k.device).view(*k.shape[:2], 1, 1)
    # index s reads the last token, which no member sees, and writes to an extra row that is dropped
    index = (row * length + members.clamp(max=length - 1)).flatten()
    keys, values = (
        x.reshape(-1, x.shape[-1]).index_select(0, index).view(x.shape[0], -1, size, x.shape[-1]) for x in (k, v)
    )
    y = values[:, :, :1]
    if size > 1:
        # queries from the second on and keys from the first on: causal attention without the token's own key
        earlier = keys[:, :, :-1], values[:, :, :-1]
        later_y = softmax_attention.fused_attention(keys[:, :, 1:], *earlier, None, causal=True, scale=scale)
        y = torch.cat([y, later_y], dim=2)
    target = (row * (length + 1) + members).flatten()
    total = y.new_zeros(row.numel() * (length + 1), v.shape[-1]).index_add(0, target, y.reshape(-1, v.shape[-1]))
    count = count_values(target, total.shape[0]).clamp(min=1).to(total.dtype)
    return (total / count[:, None]).view(*k.shape[:2], length + 1, v.shape[-1])[:, :, :length]


def balanced_attention_reference(
    k: Float[Tensor, "b h s e"], v: Float[Tensor, "b h s f"], members: Int[Tensor, "b h k w"], *, scale: float
) -> tuple[Float[Tensor, "b h s f"], Float[Tensor, "b h s s"]]:
    """The definition with the weights of all pairs: the mean over groups of a softmax within each."""
    column = torch.arange(k.shape[2], device=k.device)
    inside = (members[..., None] == column).any(3)
    earlier = inside[..., :, None] & inside[..., None, :] & (column < column[:, None])
    visible = fall_back_to_self(earlier, inside[..., None] & (column == column[:, None]))
    scores = (k @ k.mT * scale)[:, :, None].expand(visible.shape).flatten(1, 2)
    summed = softmax_attention.masked_softmax(scores, visible.flatten(1, 2)).view(visible.shape).sum(2)
    weights = (summed / inside.sum(2)[..., None].clamp(min=1)).to(v.dtype)
    return weights @ v, weights


def top_members(
    similarity: Float[Tensor, "b h s k"], size: int, share: Int[Tensor, " b"] | None = None
) -> Int[Tensor, "b h k w"]:
    """The `size` most similar tokens of each of k groups, sorted by index; only the best `share` of them in each row.

    A token with similarity -inf is never a member. The index `s` stands for no token.
    """
    length = similarity.shape[2]
    top = similarity.transpose(2, 3).topk(min(size, length), dim=-1)
    index = top.indices.masked_fill(top.values == -torch.inf, length)
    if share is not None:
        beyond_share = torch.arange(index.shape[-1], device=index.device) >= share[:, None, None, None]
        index = index.masked_fill(beyond_share, length)
    return index.sort(dim=-1).values
