"""`shifted` with its gradient written out, for a CPU: few passes over few scores, which stay in its caches."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.autocast import autocast_disabled
from manyformer.ops.scratch_buffer import ScratchBuffer
from manyformer.ops.toeplitz_attention import QueryOffset
from manyformer.position.distance_terms import toeplitz_view

ROWS = 64
"""Queries in a block: smaller ones cost little on a CPU, and waste less on keys that are ahead."""

CACHED = 1 << 19
"""Scores that each thread holds at once; what has left its caches is slow to come back."""

KEPT = 1 << 23
"""Where there are no more weights than this, they are kept for the gradient: 32 MB instead of a sixth of the time."""


BUFFERS = "one", "other"
"""Names of what is written again and again."""


class SegmentPair(NamedTuple):
    """The documents that queries and keys belong to: each query sees the keys of its own."""

    at: Int[Tensor, "b l"]
    of: Int[Tensor, "b s"]


def distances_met(back: int, span: QueryOffset, begin: int, end: int, keys: int) -> tuple[slice, int]:
    """The distances that the queries from `begin` to before `end` meet, and how many keys they see."""
    seen = min(end + span.offset, keys) if span.causal else keys
    first = back - (span.offset + end - 1)
    return slice(first, first + seen + end - begin - 1), seen


def hidden(
    span: QueryOffset, numbers: SegmentPair | None, batch: slice, queries: slice, seen: int, device: torch.device
) -> Bool[Tensor, "*b c s"] | None:
    """Which of the keys a block of queries must not see; None where that is none of them."""
    ahead = None
    if span.causal:
        count = queries.stop - queries.start
        ahead = torch.ones(count, seen, dtype=torch.bool, device=device).triu(span.offset + queries.start + 1)
    if numbers is None:
        return ahead
    other = numbers.at[batch, queries, None] != numbers.of[batch, None, :seen]
    return other if ahead is None else other | ahead


class ShiftedBlock(NamedTuple):
    """Some rows of one head, or all rows of some heads, and some of their queries: what they see and meet.

    `pairs` are pairs of a head and a row, those of a head side by side; `first` is the number of the block's first
    weight among all weights.
    """

    heads: slice
    batch: slice
    pairs: slice
    queries: slice
    seen: int
    met: slice
    first: int

    @property
    def shape(self) -> tuple[int, int]:
        """Pairs and queries."""
        return self.pairs.stop - self.pairs.start, self.queries.stop - self.queries.start


class ShiftedAttentionFunction(torch.autograd.Function):
    """Softmax of q_i k_j `scale` + (q_i + turn) vectors[r_ij], applied to v_j."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        turn: Tensor | None,
        k: Tensor,
        v: Tensor,
        vectors: Tensor,
        back: int,
        span: QueryOffset,
        scale: float,
        numbers: SegmentPair | None,
    ) -> Tensor:
        given = [_by_head(x) for x in (q, k, v)]
        ctx.call = ShiftedCall(q.shape[0], back, span, scale, numbers)
        work = ShiftedBuffers(given, turn, vectors, ctx.call)
        many = work.count > KEPT or not any(ctx.needs_input_grad)
        work.kept = v.new_empty(0 if many else work.count)
        y = v.new_empty(*given[0].shape[:2], v.shape[-1])
        with autocast_disabled(q.device):
            for block in work.blocks():
                found = torch.bmm(work.weights(block), work.v[block.pairs, : block.seen])
                y[block.pairs, block.queries].copy_(found)
        ctx.save_for_backward(*given, turn, vectors, y, work.kept)
        return _by_row(y, q.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> Any:
        *given, turn, vectors, y, kept = ctx.saved_tensors
        up = _by_head(up.to(y.dtype))
        work = ShiftedBuffers(given, turn, vectors, ctx.call)
        work.kept = kept
        slopes = (up * y).sum(-1, keepdim=True)
        to_turn = None if turn is None else torch.zeros_like(turn)
        found = ShiftedGradients(
            torch.empty_like(work.q), to_turn, *(torch.zeros_like(x) for x in (work.k, work.v, vectors))
        )
        with autocast_disabled(up.device):
            for block in work.blocks():
                weights = work.kept_weights(block) if len(kept) else work.weights(block)
                work.add_gradients(block, weights, up, slopes, found)
        to_q, to_k, to_v = (_by_row(x, ctx.call.rows) for x in (found.q, found.k, found.v))
        return to_q, found.turn, to_k, to_v, found.vectors, None, None, None, None


class ShiftedCall(NamedTuple):
    """What is no tensor to learn: how many rows there are, and how the arguments of `shifted.attend` were."""

    rows: int
    back: int
    span: QueryOffset
    scale: float
    numbers: SegmentPair | None


class ShiftedGradients(NamedTuple):
    """Gradients, of which each block gives a part."""

    q: Float[Tensor, "hb l e"]
    turn: Float[Tensor, "h e"] | None
    k: Float[Tensor, "hb s e"]
    v: Float[Tensor, "hb s f"]
    vectors: Float[Tensor, "h r e"]


def _by_head(x: Float[Tensor, "b h l e"]) -> Float[Tensor, "hb l e"]:
    return x.transpose(0, 1).flatten(0, 1).contiguous()


def _by_row(x: Float[Tensor, "hb l e"], rows: int) -> Float[Tensor, "b h l e"]:
    return x.view(-1, rows, *x.shape[1:]).transpose(0, 1)


class ShiftedBuffers:
    """One call's tensors, (hb, l, e), and two buffers that are written again and again: fresh memory costs most."""

    def __init__(self, given: list[Tensor], turn: Tensor | None, vectors: Tensor, call: ShiftedCall) -> None:
        self.q, self.k, self.v = given
        self.turn, self.vectors = turn, vectors
        self.rows, self.back, self.span, self.scale, self.numbers = call
        rows = call.rows
        queries, keys = self.q.shape[1], self.k.shape[1]
        self.block = min(ROWS, queries)
        # pairs of a head and a row at a time: some rows of a head, or some heads
        cached = CACHED * torch.get_num_threads()
        self.batch = min(rows, max(1, cached // (self.block * keys)))
        self.heads = min(len(vectors), max(1, cached // (self.block * keys * rows)))
        most = max(self.batch, self.heads * rows if self.batch == rows else 0) * self.block
        self.spare = ScratchBuffer(self.q)
        for name in BUFFERS:
            # blocks see more and more: room for the last one from the beginning
            self.spare(name, most * (keys + self.block))
        self.kept = self.q.new_empty(0)
        self.later = torch.ones(self.block, self.block, dtype=torch.bool, device=self.q.device).triu(1)

    @property
    def count(self) -> int:
        """How many weights there are in all."""
        return sum(block.shape[0] * block.shape[1] * block.seen for block in self.blocks())

    def blocks(self) -> Iterator[ShiftedBlock]:
        """All of them, in order."""
        queries, count, rows = self.q.shape[1], 0, self.rows
        for head in range(0, len(self.vectors), self.heads):
            heads = slice(head, min(head + self.heads, len(self.vectors)))
            for first in range(0, rows, self.batch):
                batch = slice(first, min(first + self.batch, rows))
                pairs = slice(head * rows + first, (heads.stop - 1) * rows + batch.stop)
                for begin in range(0, queries, self.block):
                    end = min(begin + self.block, queries)
                    rows_met, seen = distances_met(self.back, self.span, begin, end, self.k.shape[1])
                    block = ShiftedBlock(heads, batch, pairs, slice(begin, end), seen, rows_met, count)
                    yield block
                    count += block.shape[0] * block.shape[1] * seen

    def kept_weights(self, block: ShiftedBlock) -> Float[Tensor, "p c s"]:
        """The weights where they are kept."""
        pairs, queries = block.shape
        return self.kept[block.first :][: pairs * queries * block.seen].view(pairs, queries, block.seen)

    def weights(self, block: ShiftedBlock) -> Float[Tensor, "p c s"]:
        """The weights, where they are to be kept or in the first buffer; the second one held the scores."""
        vectors = self.vectors[block.heads, block.met]
        each = self.spare(BUFFERS[0], *block.shape, vectors.shape[1])
        torch.bmm(self._meets(block), vectors.mT, out=each.view(len(vectors), -1, vectors.shape[1]))
        scores = self.spare(BUFFERS[1], *block.shape, block.seen)
        q, k = self.q[block.pairs, block.queries], self.k[block.pairs, : block.seen]
        torch.baddbmm(toeplitz_view(each, block.seen), q, k.mT, alpha=self.scale, out=scores)
        self._hide(scores, block)
        into = self.kept_weights(block) if len(self.kept) else self.spare(BUFFERS[0], *block.shape, block.seen)
        weights: Tensor = torch.softmax(scores, -1, out=into)
        return weights

    def add_gradients(
        self, block: ShiftedBlock, weights: Tensor, up: Tensor, slopes: Tensor, found: ShiftedGradients
    ) -> None:
        """Add this block's part to the gradients."""
        here, keys = (block.pairs, block.queries), (block.pairs, slice(0, block.seen))
        vectors = self.vectors[block.heads, block.met]
        each = self.spare(BUFFERS[1], *block.shape, vectors.shape[1])
        # what the shift leaves empty: a triangle on either side
        for side in (slice(0, block.shape[1]), slice(-block.shape[1], None)):
            each[:, :, side].zero_()
        # by key, and the same numbers by distance
        inner, flat = toeplitz_view(each, block.seen), each.view(len(vectors), -1, vectors.shape[1])
        torch.bmm(up[here], self.v[keys].mT, out=inner)
        inner.sub_(slopes[here]).mul_(weights)
        found.v[keys].baddbmm_(weights.mT, up[here])
        found.k[keys].baddbmm_(inner.mT, self.q[here], alpha=self.scale)
        by_distance = torch.bmm(flat, vectors)
        if found.turn is not None:
            found.turn[block.heads] += by_distance.sum(1)
        found.q[here] = by_distance.view(*block.shape, -1).baddbmm_(inner, self.k[keys], alpha=self.scale)
        found.vectors[block.heads, block.met].baddbmm_(flat.mT, self._meets(block))

    def _meets(self, block: ShiftedBlock) -> Float[Tensor, "h n e"]:
        """What meets the vectors: the queries of all rows of each head, end to end, turned."""
        q = self.q[block.pairs, block.queries].reshape(block.heads.stop - block.heads.start, -1, self.q.shape[-1])
        return q if self.turn is None else q + self.turn[block.heads, None]

    def _hide(self, scores: Float[Tensor, "p c s"], block: ShiftedBlock) -> None:
        if self.numbers is not None:
            unseen = hidden(self.span, self.numbers, block.batch, block.queries, block.seen, scores.device)
            assert unseen is not None
            scores.view(-1, *unseen.shape).masked_fill_(unseen, -torch.inf)
        elif self.span.causal:
            # what lies ahead are the last columns alone
            ahead = scores[:, :, self.span.offset + block.queries.start :]
            ahead.masked_fill_(self.later[: ahead.shape[1], : ahead.shape[2]], -torch.inf)
