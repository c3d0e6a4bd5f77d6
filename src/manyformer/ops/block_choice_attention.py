"""Causal attention to a query's own block of keys and to earlier blocks that are chosen for each query.

Rows are one document from its first token on. The pairs of a query and a chosen block are sorted by block, so that the
queries of a block are computed together, and the softmaxes of the parts are merged by their log-sum-exps: time and
memory grow with the number of chosen pairs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.device_reads import count_values, reads_are_free

MAX_CHUNK = 64
"""Queries of one block that are computed together; the last chunk of a block is padded."""


def choice_mask(
    chosen: Int[Tensor, "b h l c"], block: int, positions: Int[Tensor, "#b l"], length: int
) -> Bool[Tensor, "b h l s"]:
    """The definition: which of `length` keys a query at a position sees.

    It sees those up to itself in its own block, and all of the chosen blocks."""
    column = torch.arange(length, device=chosen.device)
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
    padding = -q.shape[2] % block
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q_blocks, k_blocks, v_blocks = (
        F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, block)).flatten(0, 2)  # type: ignore[no-untyped-call]
        for x in (q, k, v)
    )
    causal = torch.ones(block, block, dtype=torch.bool, device=q.device).tril()
    own_y, own_lse = _attend(q_blocks, k_blocks, v_blocks, scale, causal)
    shape = (*q.shape[:2], length + padding)
    own_y = own_y.view(*shape, -1)[:, :, :length]
    own_lse = own_lse.view(shape)[:, :, :length]
    chunks = _chunk_pairs(chosen, len(k_blocks) // (q.shape[0] * q.shape[1]), min(block, MAX_CHUNK))
    queries = q.flatten(0, 2)[chunks.queries]
    y, lse = _attend(queries, k_blocks[chunks.blocks], v_blocks[chunks.blocks], scale)
    pair_count = chosen.numel()
    pair_lses = lse.flatten()[chunks.slots]
    if chunks.is_pair is not None:
        pair_lses = pair_lses.masked_fill(~chunks.is_pair, -torch.inf)
    lses = lse.new_full((pair_count,), -torch.inf).index_copy(0, chunks.pairs, pair_lses)
    ys = y.new_zeros(pair_count, y.shape[-1]).index_copy(0, chunks.pairs, y.flatten(0, 1)[chunks.slots])
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
    pair_count = len(flat_blocks)
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


def _attend(
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
