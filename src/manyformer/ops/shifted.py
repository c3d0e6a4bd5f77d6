"""Softmax attention with a vector for every distance, near and far: a block of queries at a time.

What a query gets from all distances is one product of matrices; of that, each row is what belongs to the keys one
place further to the left, which is a view. Memory is linear in length, as no more than one block's scores exist.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyformer.dropout import drop
from manyformer.ops.toeplitz import Span
from manyformer.position.distance import along

BLOCK = 128

CACHED = 1 << 18
"""Scores that are held at once on a CPU, where what has left its caches is slow to come back."""


class Numbers(NamedTuple):
    """The documents that queries and keys belong to: each query sees the keys of its own."""

    at: Int[Tensor, "b l"]
    of: Int[Tensor, "b s"]


def attend(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    vectors: Float[Tensor, "h r e"],
    turn: Float[Tensor, "h e"] | None,
    back: int,
    span: Span,
    *,
    scale: float,
    dropout: float = 0.0,
    numbers: Numbers | None = None,
) -> Float[Tensor, "b h l f"]:
    """Softmax of scale q_i k_j + (q_i + turn) vectors[r_ij] over keys j, applied to v_j.

    Row `back` is the distance 0, and all distances that are met have their own rows. Every query must see a key. Scores
    and weights are made anew for the gradient.
    """
    meets = q if turn is None else q + turn[:, None]
    if dropout or q.device.type != "cpu":
        return _checkpointed(q, meets, k, v, vectors, back, span, scale, dropout, numbers)
    kind, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    given = (x.to(wide) for x in (q, meets, k, v, vectors))
    y: Tensor = _Shifted.apply(*given, back, span, scale, numbers)  # type: ignore[no-untyped-call]
    return y.to(kind)


def _checkpointed(
    q: Tensor,
    meets: Tensor,
    k: Tensor,
    v: Tensor,
    vectors: Tensor,
    back: int,
    span: Span,
    scale: float,
    dropout: float,
    numbers: Numbers | None,
) -> Tensor:
    """The definition, block by block."""

    def block(q: Tensor, meets: Tensor, k: Tensor, v: Tensor, vectors: Tensor, begin: int) -> Tensor:
        logits = q @ k.mT * scale + along(meets @ vectors.mT, k.shape[2])
        hidden = _hidden(span, numbers, slice(0, q.shape[0]), begin, begin + q.shape[2], k.shape[2], q.device)
        if hidden is not None:
            logits = logits.masked_fill(hidden if numbers is None else hidden[:, None], -torch.inf)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return drop(logits.softmax(-1, dtype=wide).to(v.dtype), dropout) @ v

    parts = []
    for begin in range(0, q.shape[2], BLOCK):
        end = min(begin + BLOCK, q.shape[2])
        rows, seen = _rows(back, span, begin, end, k.shape[2])
        given = q[:, :, begin:end], meets[:, :, begin:end], k[:, :, :seen], v[:, :, :seen], vectors[:, rows]
        if torch.is_grad_enabled():
            again = dropout > 0
            parts.append(checkpoint(block, *given, begin, use_reentrant=False, preserve_rng_state=again))
        else:
            parts.append(block(*given, begin))
    return torch.cat(parts, dim=2)


def _rows(back: int, span: Span, begin: int, end: int, keys: int) -> tuple[slice, int]:
    """The distances that the queries from `begin` to before `end` meet, and how many keys they see."""
    seen = min(end + span.offset, keys) if span.causal else keys
    first = back - (span.offset + end - 1)
    return slice(first, first + seen + end - begin - 1), seen


def _hidden(
    span: Span, numbers: Numbers | None, batch: slice, begin: int, end: int, seen: int, device: torch.device
) -> Bool[Tensor, "*b c s"] | None:
    """Which of the keys a block of queries must not see; None where that is none of them."""
    hidden = None
    if span.causal:
        hidden = torch.ones(end - begin, seen, dtype=torch.bool, device=device).triu(span.offset + begin + 1)
    if numbers is None:
        return hidden
    other = numbers.at[batch, begin:end, None] != numbers.of[batch, None, :seen]
    return other if hidden is None else other | hidden


class _Block(NamedTuple):
    """Some rows of the batch and some queries of a head: what they see, and by which vectors."""

    head: int
    batch: slice
    begin: int
    end: int
    seen: int
    rows: slice


class _Shifted(torch.autograd.Function):
    """The same with its gradient written out, in few passes over few scores, which stay in a CPU's caches.

    Tensors are (h, b, l, e) within. Two buffers are written again and again: fresh memory is what costs most.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        meets: Tensor,
        k: Tensor,
        v: Tensor,
        vectors: Tensor,
        back: int,
        span: Span,
        scale: float,
        numbers: Numbers | None,
    ) -> Tensor:
        given = [x.transpose(0, 1).contiguous() for x in (q * scale, meets, k, v)]
        work = _Work(given, vectors, back, span, numbers)
        y = v.new_empty(*given[0].shape[:3], v.shape[-1])
        with torch.autocast(q.device.type, enabled=False):
            for block in work.blocks():
                weights = work.weights(block)
                found = y[block.head, block.batch, block.begin : block.end]
                found.copy_(torch.bmm(weights, work.v[block.head, block.batch, : block.seen]))
        ctx.save_for_backward(*given, vectors, y)
        ctx.rest = back, span, scale, numbers
        return y.transpose(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> Any:
        *given, vectors, y = ctx.saved_tensors
        back, span, scale, numbers = ctx.rest
        up = up.transpose(0, 1).to(y.dtype).contiguous()
        work = _Work(given, vectors, back, span, numbers)
        slopes = (up * y).sum(-1, keepdim=True)
        found = [torch.zeros_like(x) for x in (*given, vectors)]
        with torch.autocast(up.device.type, enabled=False):
            for block in work.blocks():
                work.add_gradients(block, up, slopes, found)
        found[0] *= scale
        return *(x.transpose(0, 1) for x in found[:4]), found[4], None, None, None, None


class _Work:
    """One call's tensors, and the two buffers."""

    def __init__(self, given: list[Tensor], vectors: Tensor, back: int, span: Span, numbers: Numbers | None) -> None:
        self.q, self.meets, self.k, self.v = given
        self.vectors, self.back, self.span, self.numbers = vectors, back, span, numbers
        rows, queries, keys = self.q.shape[1], self.q.shape[2], self.k.shape[2]
        self.block = min(BLOCK, queries)
        self.batch = min(rows, max(1, CACHED // (self.block * keys)))
        self.spare = [self.q.new_empty(self.batch * self.block * size) for size in (keys + self.block, keys)]

    def blocks(self) -> Iterator[_Block]:
        heads, rows, queries, _ = self.q.shape
        for head in range(heads):
            for first in range(0, rows, self.batch):
                for begin in range(0, queries, self.block):
                    end = min(begin + self.block, queries)
                    met, seen = _rows(self.back, self.span, begin, end, self.k.shape[2])
                    yield _Block(head, slice(first, min(first + self.batch, rows)), begin, end, seen, met)

    def weights(self, block: _Block) -> Float[Tensor, "c l s"]:
        """The weights, in the first buffer; the second one held the scores."""
        q, k = self._queries(self.q, block), self.k[block.head, block.batch, : block.seen]
        met = self.vectors[block.head, block.rows]
        each = self._buffer(0, len(q), block, len(met))
        torch.mm(self._queries(self.meets, block).reshape(-1, q.shape[-1]), met.mT, out=each.view(-1, len(met)))
        scores = self._buffer(1, len(q), block, block.seen)
        torch.baddbmm(along(each, block.seen), q, k.mT, out=scores)
        self._hide(scores, block)
        weights: Tensor = torch.softmax(scores, -1, out=self._buffer(0, len(q), block, block.seen))
        return weights

    def add_gradients(self, block: _Block, up: Tensor, slopes: Tensor, found: list[Tensor]) -> None:
        """Add this block's part to the gradients of q (before its scale), of what meets vectors, k, v and vectors."""
        to_q, to_meets, to_k, to_v, to_vectors = found
        weights = self.weights(block)
        ups = self._queries(up, block)
        keys = block.head, block.batch, slice(0, block.seen)
        to_v[keys] += torch.bmm(weights.mT, ups)
        inner = torch.bmm(ups, self.v[keys].mT, out=self._buffer(1, len(ups), block, block.seen))
        inner.sub_(self._queries(slopes, block)).mul_(weights)
        self._queries(to_q, block).copy_(torch.bmm(inner, self.k[keys]))
        to_k[keys] += torch.bmm(inner.mT, self._queries(self.q, block))
        met = self.vectors[block.head, block.rows]
        each = self._buffer(0, len(ups), block, len(met)).zero_()
        along(each, block.seen).copy_(inner)
        flat = each.view(-1, len(met))
        meets = self._queries(self.meets, block)
        self._queries(to_meets, block).copy_((flat @ met).view(meets.shape))
        to_vectors[block.head, block.rows].addmm_(flat.mT, meets.reshape(-1, meets.shape[-1]))

    def _queries(self, x: Tensor, block: _Block) -> Float[Tensor, "c l n"]:
        return x[block.head, block.batch, block.begin : block.end]

    def _buffer(self, number: int, rows: int, block: _Block, width: int) -> Float[Tensor, "c l n"]:
        shape = rows, block.end - block.begin, width
        return self.spare[number][: shape[0] * shape[1] * shape[2]].view(shape)

    def _hide(self, scores: Float[Tensor, "c l s"], block: _Block) -> None:
        if self.numbers is not None:
            rows = block.batch, block.begin, block.end, block.seen
            hidden = _hidden(self.span, self.numbers, *rows, scores.device)
            assert hidden is not None
            scores.masked_fill_(hidden, -torch.inf)
        elif self.span.causal:
            # what lies ahead are the last columns alone
            ahead = scores[:, :, self.span.offset + block.begin :]
            later = torch.ones(ahead.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            ahead.masked_fill_(later, -torch.inf)
