"""Softmax attention with a learned vector for every distance, computed one block of queries at a time.

The products of a block of queries with all distance vectors are one matrix product; aligning them with keys shifts each
row by one column, which is a view. Memory is linear in length: the weights of one block exist at a time. On a CPU the
gradient is written by hand, in few passes over scores that fit its caches.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.nn.positions.position import toeplitz_view
from manyformer.nn.runtime.device_reads import ScratchBuffer
from manyformer.nn.runtime.dropout import drop
from manyformer.nn.runtime.handwritten_gradient import needs_plain_operations
from manyformer.nn.runtime.one_operation import OneOperation
from manyformer.nn.runtime.recompute import recompute_for_gradient
from manyformer.nn.runtime.torch_internals import autocast_disabled
from manyformer.nn.softmax.toeplitz_attention import QueryOffset

BLOCK = 128
"""Queries per block where the gradient is not written by hand."""

MAX_BLOCK_QUERIES = 64
"""Queries per block: small blocks cost little on a CPU and waste less on hidden keys ahead."""

SCORES_PER_THREAD = 1 << 19
"""Scores per thread that exist at once, so that they stay in its caches."""

MAX_SAVED_WEIGHTS = 1 << 23
"""Up to this many weights, 32 MB, are saved for the gradient, which saves a sixth of the time."""

BUFFERS = "first", "second"
"""Names of the two scratch buffers."""


class SegmentPair(NamedTuple):
    """Segment ids of queries and keys: a query attends to keys of its own segment."""

    query_segments: Int[Tensor, "b l"]
    key_segments: Int[Tensor, "b s"]


def distances_met(back: int, query_offset: QueryOffset, begin: int, end: int, keys: int) -> tuple[slice, int]:
    """Rows of the distance vectors that queries `begin` to `end` - 1 use, and the number of keys they attend to."""
    if query_offset.causal:
        num_keys = min(end + query_offset.offset, keys)
    else:
        num_keys = keys
    first = back - (query_offset.offset + end - 1)
    return slice(first, first + num_keys + end - begin - 1), num_keys


def hidden_keys(
    query_offset: QueryOffset,
    segments: SegmentPair | None,
    batch: slice,
    queries: slice,
    num_keys: int,
    device: torch.device,
) -> Bool[Tensor, "*b c s"] | None:
    """Mask of the keys hidden from a block of queries; None where all are visible."""
    ahead = None
    if query_offset.causal:
        count = queries.stop - queries.start
        first_ahead = query_offset.offset + queries.start + 1
        ahead = torch.ones(count, num_keys, dtype=torch.bool, device=device).triu(first_ahead)
    if segments is None:
        return ahead
    other_document = segments.query_segments[batch, queries, None] != segments.key_segments[batch, None, :num_keys]
    if ahead is None:
        return other_document
    return other_document | ahead


def distance_vector_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    vectors: Float[Tensor, "h r e"],
    query_bias: Float[Tensor, "h e"] | None,
    back: int,
    query_offset: QueryOffset,
    *,
    scale: float,
    dropout: float = 0.0,
    segments: SegmentPair | None = None,
) -> Float[Tensor, "b h l f"]:
    """Softmax of scale q_i k_j + (q_i + query_bias) vectors[r_ij] over keys j, applied to v_j.

    Row `back` is distance 0, and every distance that occurs has a row of its own. Every query must see a key. Scores
    are recomputed for the gradient, and so are weights where there are many.
    """
    if not dropout and q.device.type in ("cpu", "meta") and not needs_plain_operations():
        dtype = v.dtype
        compute_dtype = torch.promote_types(v.dtype, torch.float32)
        inputs = (None if x is None else x.to(compute_dtype) for x in (q, query_bias, k, v, vectors))
        documents = (None, None) if segments is None else segments
        y: Tensor = ShiftedAttentionFunction.call(*inputs, back, *query_offset, scale, *documents)
        return y.to(dtype)

    def block(q: Tensor, biased_q: Tensor, k: Tensor, v: Tensor, vectors: Tensor, begin: int) -> Tensor:
        # the product with all vectors is by distance; the view shifts each row by one, so that it is by key
        logits = q @ k.mT * scale + toeplitz_view(biased_q @ vectors.mT, k.shape[2])
        queries = slice(begin, begin + q.shape[2])
        hidden_pairs = hidden_keys(query_offset, segments, slice(0, q.shape[0]), queries, k.shape[2], q.device)
        if hidden_pairs is not None:
            logits = logits.masked_fill(hidden_pairs if segments is None else hidden_pairs[:, None], -torch.inf)
        compute_dtype = torch.promote_types(logits.dtype, torch.float32)
        return drop(logits.softmax(-1, dtype=compute_dtype).to(v.dtype), dropout) @ v

    biased_q = q if query_bias is None else q + query_bias[:, None]
    parts = []
    for begin in range(0, q.shape[2], BLOCK):
        end = min(begin + BLOCK, q.shape[2])
        rows, num_keys = distances_met(back, query_offset, begin, end, k.shape[2])
        tokens = q[:, :, begin:end], biased_q[:, :, begin:end], k[:, :, :num_keys], v[:, :, :num_keys]
        parts.append(recompute_for_gradient(block, *tokens, vectors[:, rows], begin, dropout=dropout))
    return torch.cat(parts, dim=2)


class ShiftedBlock(NamedTuple):
    """A block of queries of some rows of one head, or of all rows of some heads, with its keys and distances.

    `pairs` are (head, row) pairs, those of a head adjacent; `met_rows` are the rows of the distance vectors;
    `first_weight` is the index of the block's first weight among all weights.
    """

    heads: slice
    batch: slice
    pairs: slice
    queries: slice
    num_keys: int
    met_rows: slice
    first_weight: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of (head, row) pairs and of queries."""
        return self.pairs.stop - self.pairs.start, self.queries.stop - self.queries.start


class ShiftedAttentionFunction(OneOperation):
    """Softmax of `scale` q_i k_j + (q_i + query_bias) vectors[r_ij], applied to v_j.

    Blocks depend on the number of threads, and buffers are written to in parts, so that a compiler cannot trace it."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        query_bias: Tensor | None,
        k: Tensor,
        v: Tensor,
        vectors: Tensor,
        back: int,
        offset: int,
        causal: bool,  # noqa: FBT001 - a function with a gradient has no keywords
        scale: float,
        query_segments: Tensor | None,
        key_segments: Tensor | None,
    ) -> Tensor:
        inputs = [_by_head(x) for x in (q, k, v)]
        segments = None
        if query_segments is not None and key_segments is not None:
            segments = SegmentPair(query_segments, key_segments)
        ctx.call = ShiftedCall(q.shape[0], back, QueryOffset(offset, causal), scale, segments)
        buffers = ShiftedBuffers(inputs, query_bias, vectors, ctx.call)
        # an empty tensor of saved weights says that they are computed again
        recomputes = buffers.num_weights > MAX_SAVED_WEIGHTS or not any(ctx.needs_input_grad)
        buffers.saved_weights = v.new_empty(0 if recomputes else buffers.num_weights)
        y = v.new_empty(*inputs[0].shape[:2], v.shape[-1])
        with autocast_disabled(q.device):
            for block in buffers.blocks():
                block_y = torch.bmm(buffers.weights(block), buffers.v[block.pairs, : block.num_keys])
                y[block.pairs, block.queries].copy_(block_y)
        ctx.save_for_backward(*inputs, query_bias, vectors, y, buffers.saved_weights)
        return _by_row(y, q.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        *inputs, query_bias, vectors, y, saved_weights = ctx.saved_tensors
        grad_y = _by_head(grad_y.to(y.dtype))
        buffers = ShiftedBuffers(inputs, query_bias, vectors, ctx.call)
        buffers.saved_weights = saved_weights
        delta = (grad_y * y).sum(-1, keepdim=True)
        grad_query_bias = None
        if query_bias is not None:
            grad_query_bias = torch.zeros_like(query_bias)
        zeros = (torch.zeros_like(x) for x in (buffers.k, buffers.v, vectors))
        grads = ShiftedGradients(torch.empty_like(buffers.q), grad_query_bias, *zeros)
        with autocast_disabled(grad_y.device):
            for block in buffers.blocks():
                if len(saved_weights):
                    weights = buffers.saved_block_weights(block)
                else:
                    weights = buffers.weights(block)
                buffers.add_gradients(block, weights, grad_y, delta, grads)
        grad_q, grad_k, grad_v = (_by_row(x, ctx.call.num_rows) for x in (grads.q, grads.k, grads.v))
        return grad_q, grads.query_bias, grad_k, grad_v, grads.vectors, None, None, None, None, None, None

    @classmethod
    def empty_results(cls, *arguments: Any) -> list[Tensor]:
        q, _, _, v, *_ = arguments
        return [v.new_empty(*q.shape[:3], v.shape[-1])]


class ShiftedCall(NamedTuple):
    """Arguments of `distance_vector_attention` that take no gradient, and the batch size."""

    num_rows: int
    back: int
    query_offset: QueryOffset
    scale: float
    segments: SegmentPair | None


class ShiftedGradients(NamedTuple):
    """Gradients accumulated over blocks."""

    q: Float[Tensor, "hb l e"]
    query_bias: Float[Tensor, "h e"] | None
    k: Float[Tensor, "hb s e"]
    v: Float[Tensor, "hb s f"]
    vectors: Float[Tensor, "h r e"]


def _by_head(x: Float[Tensor, "b h l e"]) -> Float[Tensor, "hb l e"]:
    return x.transpose(0, 1).flatten(0, 1).contiguous()


def _by_row(x: Float[Tensor, "hb l e"], rows: int) -> Float[Tensor, "b h l e"]:
    return x.view(-1, rows, *x.shape[1:]).transpose(0, 1)


class ShiftedBuffers:
    """Tensors (hb, l, e) of one call, and two reused scratch buffers, because allocating memory costs most."""

    def __init__(self, inputs: list[Tensor], query_bias: Tensor | None, vectors: Tensor, call: ShiftedCall) -> None:
        self.q, self.k, self.v = inputs
        self.query_bias = query_bias
        self.vectors = vectors
        self.num_rows, self.back, self.query_offset, self.scale, self.segments = call
        rows = call.num_rows
        queries = self.q.shape[1]
        keys = self.k.shape[1]
        self.block = min(MAX_BLOCK_QUERIES, queries)
        # (head, row) pairs per block: some rows of a head, or all rows of some heads
        cached = SCORES_PER_THREAD * torch.get_num_threads()
        self.rows_per_block = min(rows, max(1, cached // (self.block * keys)))
        self.heads_per_block = min(len(vectors), max(1, cached // (self.block * keys * rows)))
        max_pairs = max(self.rows_per_block, self.heads_per_block * rows if self.rows_per_block == rows else 0)
        self.scratch = ScratchBuffer(self.q)
        for name in BUFFERS:
            # later blocks have more keys: allocated for the last one at once
            self.scratch(name, max_pairs * self.block * (keys + self.block))
        self.saved_weights = self.q.new_empty(0)
        self.future_mask = torch.ones(self.block, self.block, dtype=torch.bool, device=self.q.device).triu(1)

    @property
    def num_weights(self) -> int:
        """Number of weights over all blocks."""
        return sum(block.shape[0] * block.shape[1] * block.num_keys for block in self.blocks())

    def blocks(self) -> Iterator[ShiftedBlock]:
        """All blocks, in order."""
        queries = self.q.shape[1]
        count = 0
        num_rows = self.num_rows
        for head in range(0, len(self.vectors), self.heads_per_block):
            heads = slice(head, min(head + self.heads_per_block, len(self.vectors)))
            for first_row in range(0, num_rows, self.rows_per_block):
                batch = slice(first_row, min(first_row + self.rows_per_block, num_rows))
                pairs = slice(head * num_rows + first_row, (heads.stop - 1) * num_rows + batch.stop)
                for begin in range(0, queries, self.block):
                    end = min(begin + self.block, queries)
                    rows_met, num_keys = distances_met(self.back, self.query_offset, begin, end, self.k.shape[1])
                    block = ShiftedBlock(heads, batch, pairs, slice(begin, end), num_keys, rows_met, count)
                    yield block
                    count += block.shape[0] * block.shape[1] * num_keys

    def saved_block_weights(self, block: ShiftedBlock) -> Float[Tensor, "p c s"]:
        """The saved weights of a block, as a view."""
        shape = torch.Size([*block.shape, block.num_keys])
        return self.saved_weights[block.first_weight :][: shape.numel()].view(shape)

    def weights(self, block: ShiftedBlock) -> Float[Tensor, "p c s"]:
        """Compute a block's weights into the saved weights or the first buffer; the second buffer holds the scores."""
        vectors = self.vectors[block.heads, block.met_rows]
        by_distance = self.scratch(BUFFERS[0], *block.shape, vectors.shape[1])
        torch.bmm(self._biased_queries(block), vectors.mT, out=by_distance.view(len(vectors), -1, vectors.shape[1]))
        scores = self.scratch(BUFFERS[1], *block.shape, block.num_keys)
        q = self.q[block.pairs, block.queries]
        k = self.k[block.pairs, : block.num_keys]
        # reads one buffer and writes the other, which by then nobody needs
        torch.baddbmm(toeplitz_view(by_distance, block.num_keys), q, k.mT, alpha=self.scale, out=scores)
        self._mask_scores(scores, block)
        if len(self.saved_weights):
            return torch.softmax(scores, -1, out=self.saved_block_weights(block))
        return torch.softmax(scores, -1, out=self.scratch(BUFFERS[0], *block.shape, block.num_keys))

    def add_gradients(
        self, block: ShiftedBlock, weights: Tensor, grad_y: Tensor, delta: Tensor, grads: ShiftedGradients
    ) -> None:
        """Add a block's contribution to the gradients."""
        queries = (block.pairs, block.queries)
        keys = (block.pairs, slice(0, block.num_keys))
        vectors = self.vectors[block.heads, block.met_rows]
        padded_grad = self.scratch(BUFFERS[1], *block.shape, vectors.shape[1])
        # columns that the shifted view leaves unwritten: a triangle on either side
        for side in (slice(0, block.shape[1]), slice(-block.shape[1], None)):
            padded_grad[:, :, side].zero_()
        # two views of one buffer: by key and by distance
        grad_scores = toeplitz_view(padded_grad, block.num_keys)
        grad_by_distance = padded_grad.view(len(vectors), -1, vectors.shape[1])
        torch.bmm(grad_y[queries], self.v[keys].mT, out=grad_scores)
        grad_scores.sub_(delta[queries]).mul_(weights)
        grads.v[keys].baddbmm_(weights.mT, grad_y[queries])
        grads.k[keys].baddbmm_(grad_scores.mT, self.q[queries], alpha=self.scale)
        # the same numbers, by distance: the gradient through the vectors is one product
        grad_biased_q = torch.bmm(grad_by_distance, vectors)
        if grads.query_bias is not None:
            grads.query_bias[block.heads] += grad_biased_q.sum(1)
        grads.q[queries] = grad_biased_q.view(*block.shape, -1).baddbmm_(grad_scores, self.k[keys], alpha=self.scale)
        grads.vectors[block.heads, block.met_rows].baddbmm_(grad_by_distance.mT, self._biased_queries(block))

    def _biased_queries(self, block: ShiftedBlock) -> Float[Tensor, "h n e"]:
        """The queries plus `query_bias`, with the rows of each head concatenated."""
        q = self.q[block.pairs, block.queries].reshape(block.heads.stop - block.heads.start, -1, self.q.shape[-1])
        if self.query_bias is None:
            return q
        return q + self.query_bias[block.heads, None]

    def _mask_scores(self, scores: Float[Tensor, "p c s"], block: ShiftedBlock) -> None:
        if self.segments is not None:
            tokens = block.batch, block.queries, block.num_keys
            hidden_pairs = hidden_keys(self.query_offset, self.segments, *tokens, scores.device)
            assert hidden_pairs is not None
            scores.view(-1, *hidden_pairs.shape).masked_fill_(hidden_pairs, -torch.inf)
        elif self.query_offset.causal:
            # only the last columns can be ahead of a query
            ahead = scores[:, :, self.query_offset.offset + block.queries.start :]
            ahead.masked_fill_(self.future_mask[: ahead.shape[1], : ahead.shape[2]], -torch.inf)
