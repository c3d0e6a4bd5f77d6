"""Attention of each query to tokens or blocks that are chosen for it by their scores.

Chosen tokens are the same for all heads, which share keys and values: these are gathered for a chunk of queries at a
time and again for the gradient. Chosen blocks come with the query's own block, in rows that are one document from its
first token on; the pairs of a query and a chosen block are sorted by block, so that the queries of a block are computed
together, and the softmaxes of the parts are merged by their log-sum-exps. Time and memory grow with the number of
chosen pairs.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.nn.ops.softmax_attention import masked_softmax
from manyformer.nn.runtime.device_reads import count_values, is_readable, reads_are_free
from manyformer.nn.runtime.recompute import recompute_for_gradient
from manyformer.nn.runtime.torch_internals import is_of_any_size, narrowed

GATHERED_ELEMENTS = 1 << 22
"""Gathered numbers, or products of an index, that are held at a time."""

MAX_CHUNK = 64
"""Queries of one block that are computed together; the last chunk of a block is padded."""


def choose_highest_scores(scores: Float[Tensor, "*b n"], count: int, *, may_read: bool = True) -> Int[Tensor, "*b c"]:
    """The indices of the `count` highest scores of each row, in any order; of equal scores the last ones.

    -1 in place of scores of -inf; all indices if there are at most `count`. With `may_read` a CPU first looks whether
    there are equal scores.
    """
    scores, length = scores.detach(), scores.shape[-1]
    index = torch.arange(length, device=scores.device)
    if count >= length:
        return torch.where(scores == -torch.inf, -1, index)
    if count == 0:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.long, device=scores.device)
    values, chosen = scores.topk(count)
    threshold = values[..., -1:]
    # `topk` chooses any of equal scores: where the last one chosen has equals, a second search decides by the index.
    # On other devices, finding out whether it has would synchronize
    if not may_read or not is_readable(scores) or _has_ties(scores, threshold, count):
        level = (scores >= threshold).int() + (scores > threshold).int()
        chosen = (level * length + index.int()).topk(count, sorted=False).indices
        values = scores.gather(-1, chosen)
    return torch.where(values == -torch.inf, -1, chosen)


def _has_ties(scores: Float[Tensor, "*b n"], threshold: Float[Tensor, "*b 1"], count: int) -> bool:
    """Whether a row has other scores equal to the last one chosen; which of -inf are chosen does not matter."""
    is_unique = ((scores >= threshold).sum(-1, keepdim=True) == count) | (threshold == -torch.inf)
    return not bool(is_unique.all())


class TokenChoiceOutput(NamedTuple):
    """Outputs of all heads, and the mean over heads of the weight of each chosen token, without a gradient."""

    y: Float[Tensor, "b h l f"]
    shares: Float[Tensor, "b l m"]


def token_choice_mask(chosen: Int[Tensor, "b l m"], length: int) -> Bool[Tensor, "b 1 l s"]:
    """The definition: which of `length` keys each query sees."""
    hits = torch.zeros(*chosen.shape[:2], length + 1, dtype=torch.bool, device=chosen.device)
    # -1 marks a column beyond the last key, which is cut off
    return hits.scatter(-1, chosen.masked_fill(chosen < 0, length), 1)[:, None, :, :length]


def token_choice_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b s e"],
    v: Float[Tensor, "b s f"],
    chosen: Int[Tensor, "b l m"],
    *,
    scale: float,
) -> TokenChoiceOutput:
    """Softmax attention under `token_choice_mask`; zeros for queries without a chosen token."""
    elements = k.shape[0] * chosen.shape[2] * (k.shape[2] + v.shape[2])
    outputs = [
        recompute_for_gradient(_attend, q_chunk, k, v, chosen_chunk, scale, dropout=0.0)
        for q_chunk, chosen_chunk in _chunks_of_queries(elements, (q, 2), (chosen, 1))
    ]
    y, shares = zip(*outputs)
    return TokenChoiceOutput(torch.cat(y, 2), torch.cat(shares, 1))


def index_scores(
    q: Float[Tensor, "b h l e"], head_weights: Float[Tensor, "b l h"], k: Float[Tensor, "b s e"]
) -> Float[Tensor, "b l s"]:
    """The scores of all pairs: the positive parts of products, summed over heads with the weights of the query."""
    return (head_weights[..., None, :] @ (q.transpose(1, 2) @ k.mT[:, None]).relu()).squeeze(-2)


def choose_tokens(
    q: Float[Tensor, "b h l e"],
    head_weights: Float[Tensor, "b l h"],
    k: Float[Tensor, "b s e"],
    visible: Bool[Tensor, "#b l s"],
    count: int,
) -> Int[Tensor, "b l m"]:
    """The `count` visible tokens of each query with the largest `index_scores`, -1 for none."""
    chunks = _chunks_of_queries(q.shape[0] * q.shape[1] * k.shape[1], (q, 2), (head_weights, 1), (visible, 1))
    chosen = [
        choose_highest_scores(index_scores(q_chunk, weights_chunk, k).masked_fill(~visible_chunk, -torch.inf), count)
        for q_chunk, weights_chunk, visible_chunk in chunks
    ]
    return torch.cat(chosen, 1)


def chosen_index_scores(
    q: Float[Tensor, "b h l e"],
    head_weights: Float[Tensor, "b l h"],
    k: Float[Tensor, "b s e"],
    chosen: Int[Tensor, "b l m"],
) -> Float[Tensor, "b l m"]:
    """`index_scores` of the chosen tokens, with a gradient; -inf where there is none."""
    elements = k.shape[0] * chosen.shape[2] * k.shape[2]
    chunks = _chunks_of_queries(elements, (q, 2), (head_weights, 1), (chosen, 1))
    return torch.cat([recompute_for_gradient(_index_chosen, *chunk, k, dropout=0.0) for chunk in chunks], 1)


def gather_tokens(x: Float[Tensor, "b s e"], chosen: Int[Tensor, "b l m"]) -> Float[Tensor, "b l m e"]:
    """The vectors of the chosen tokens of each query; any vector in place of -1."""
    index = chosen.clamp(min=0).flatten(1)[..., None].expand(-1, -1, x.shape[-1])
    return x.gather(1, index).unflatten(1, chosen.shape[1:])  # type: ignore[no-untyped-call, no-any-return]


def _chunks_of_queries(elements: int, *parts: tuple[Tensor, int]) -> Iterable[tuple[Tensor, ...]]:
    """Tensors split along their axes of queries, each of which takes so many elements.

    All queries are one chunk in an exported graph of any length, in which the number of chunks would be fixed."""
    x, axis = parts[0]
    if is_of_any_size(elements) or is_of_any_size(x.shape[axis]):
        return [tuple(part for part, _ in parts)]
    size = max(1, GATHERED_ELEMENTS // max(1, elements))
    return zip(*(torch.split(part, size, axis) for part, axis in parts))


def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    by_query = q.transpose(1, 2)
    scores = by_query @ gather_tokens(k, chosen).mT * scale
    # (b l h m): each query has keys of its own, and all heads share them
    weights = masked_softmax(scores, (chosen >= 0)[..., None, :].expand_as(scores))
    y = weights.to(v.dtype) @ gather_tokens(v, chosen)
    return y.transpose(1, 2), weights.detach().mean(2)


def _index_chosen(q: Tensor, head_weights: Tensor, chosen: Tensor, k: Tensor) -> Tensor:
    products = (q.transpose(1, 2) @ gather_tokens(k, chosen).mT).relu()
    scores = (head_weights[..., None, :] @ products).squeeze(-2)
    return scores.masked_fill(chosen < 0, -torch.inf)


def choice_mask(
    chosen: Int[Tensor, "b h l c"], block: int, positions: Int[Tensor, "#b l"], length: int
) -> Bool[Tensor, "b h l s"]:
    """The definition: which of `length` keys a query at a position sees.

    It sees those up to itself in its own block, and all of the chosen blocks."""
    column = torch.arange(length, device=chosen.device)
    # all of a chosen block is in the past; of the own block only what is up to the query
    own = (positions[..., None] // block == column // block) & (column <= positions[..., None])
    return own[:, None] | (chosen[..., None] == column // block).any(-2)


def block_choice_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g l e"],
    v: Float[Tensor, "b g l f"],
    chosen: Int[Tensor, "b h l c"],
    block: int,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax attention under `choice_mask`, with work linear in the number of pairs of a query and a chosen block.

    `chosen` are different earlier blocks of each query, -1 for none."""
    length = q.shape[2]
    # from the number of blocks, so that exported graphs are for lengths of any remainder
    blocks = -(-length // block)
    padding = blocks * block - length
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q_blocks, k_blocks, v_blocks = (
        F.pad(x, (0, 0, 0, padding)).unflatten(2, (blocks, block)).flatten(0, 2)  # type: ignore[no-untyped-call]
        for x in (q, k, v)
    )
    causal = torch.ones(block, block, dtype=torch.bool, device=q.device).tril()
    own_y, own_lse = _attend_with_lse(q_blocks, k_blocks, v_blocks, scale, causal)
    shape = (*q.shape[:2], blocks * block)
    own_y = narrowed(own_y.view(*shape, -1), 2, 0, length)
    own_lse = narrowed(own_lse.view(shape), 2, 0, length)
    chunks = _chunk_pairs(chosen, blocks, min(block, MAX_CHUNK))
    queries = q.flatten(0, 2)[chunks.queries]
    y, lse = _attend_with_lse(queries, k_blocks[chunks.blocks], v_blocks[chunks.blocks], scale)
    pair_count = chosen.numel()
    pair_lses = lse.flatten()[chunks.slots]
    if chunks.is_pair is not None:
        pair_lses = pair_lses.masked_fill(~chunks.is_pair, -torch.inf)
    lses = lse.new_full((pair_count,), -torch.inf).index_copy(0, chunks.pairs, pair_lses)
    ys = y.new_zeros(pair_count, y.shape[-1]).index_copy(0, chunks.pairs, y.flatten(0, 1)[chunks.slots])
    # the share of each part in the softmax over all of them; the own block is never empty
    shares = torch.cat([own_lse[..., None], lses.view(chosen.shape)], -1).softmax(-1).to(v.dtype)
    outputs = torch.cat([own_y[..., None, :], ys.view(*chosen.shape, v.shape[-1])], -2)
    return (shares[..., None, :] @ outputs).squeeze(-2)


class _PairChunks(NamedTuple):
    """Pairs of a query and a chosen block, in chunks that share their block.

    `queries` are the queries in the slots of each chunk, `blocks` the block of each chunk; `pairs` are the flat indices
    of the pairs in the choice, and `slots` where each of them is. `is_pair` says which of them are pairs where the host
    has not counted them; None where all are."""

    queries: Int[Tensor, "n c"]
    blocks: Int[Tensor, " n"]
    pairs: Int[Tensor, " p"]
    slots: Int[Tensor, " p"]
    is_pair: Bool[Tensor, " p"] | None = None


def _chunk_pairs(chosen: Int[Tensor, "b h l c"], block_count: int, size: int) -> _PairChunks:
    rows = chosen.shape[0] * chosen.shape[1]
    choices = chosen.shape[3]
    device = chosen.device
    row_starts = torch.arange(rows, device=device)[:, None] * block_count
    # blocks of all rows and heads in one numbering
    flat_blocks = torch.where(chosen.flatten(0, 1) < 0, -1, chosen.flatten(0, 1) + row_starts[..., None]).flatten()
    if not reads_are_free(chosen):
        return _chunk_uncounted_pairs(flat_blocks, rows * block_count, choices, size)
    pairs = (flat_blocks >= 0).nonzero()[:, 0]
    blocks, order = flat_blocks[pairs].sort(stable=True)
    pairs = pairs[order]
    counts = torch.bincount(blocks, minlength=rows * block_count)
    chunk_counts = (counts + size - 1) // size
    rank = torch.arange(len(pairs), device=device) - (counts.cumsum(0) - counts)[blocks]
    slots = ((chunk_counts.cumsum(0) - chunk_counts)[blocks] + rank // size) * size + rank % size
    chunk_blocks = torch.arange(rows * block_count, device=device).repeat_interleave(chunk_counts)
    # empty slots compute the first query again, and no one reads them
    queries = torch.zeros(len(chunk_blocks) * size, dtype=torch.long, device=device)
    queries = queries.index_copy(0, slots, pairs // choices)
    return _PairChunks(queries.view(-1, size), chunk_blocks, pairs, slots)


def _chunk_uncounted_pairs(flat_blocks: Int[Tensor, " n"], block_count: int, choices: int, size: int) -> _PairChunks:
    """The chunks of all choices, those of no block last, in as many chunks as there could be.

    `flat_blocks` are the blocks of the choices among `block_count` of all rows."""
    device = flat_blocks.device
    # `len` would fix the number in an exported graph
    pair_count = flat_blocks.shape[0]
    chunk_limit = min(pair_count, (pair_count + block_count * (size - 1)) // size)
    blocks, pairs = flat_blocks.where(flat_blocks >= 0, block_count).sort(stable=True)
    is_pair = blocks < block_count
    counts = count_values(blocks, block_count + 1)
    chunk_ends = ((counts[:-1] + size - 1) // size).cumsum(0)
    rank = torch.arange(pair_count, device=device) - (counts.cumsum(0) - counts)[blocks]
    first_chunks = F.pad(chunk_ends, (1, 0))[blocks]
    slots = torch.where(is_pair, (first_chunks + rank // size) * size + rank % size, chunk_limit * size)
    chunk_blocks = torch.searchsorted(chunk_ends, torch.arange(chunk_limit, device=device), right=True)
    queries = torch.zeros(chunk_limit * size + 1, dtype=torch.long, device=device)
    queries = queries.index_copy(0, slots, pairs // choices)[:-1]
    blocks_of_chunks = chunk_blocks.clamp(max=block_count - 1)
    slots = slots.clamp(max=chunk_limit * size - 1)
    return _PairChunks(queries.view(-1, size), blocks_of_chunks, pairs, slots, is_pair)


def _attend_with_lse(
    q: Float[Tensor, "n l e"],
    k: Float[Tensor, "n s e"],
    v: Float[Tensor, "n s f"],
    scale: float,
    mask: Bool[Tensor, "l s"] | None = None,
) -> tuple[Float[Tensor, "n l f"], Float[Tensor, "n l"]]:
    """Outputs and log-sum-exps, in float32 at least, with gradients of both."""
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse
