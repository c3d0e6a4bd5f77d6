"""Chunks of a memory whose tokens correct it: the triangular system of each chunk and the loop that joins them.

With the memory S before a chunk, the corrections Z of its tokens, its outputs Y and the memory S' after it are

    (I + A) Z = B + R S,    Y = P Z + Q S,    S' = d S + L^T Z + C

(Yang et al. 2024, arXiv:2406.06484, section 3.2). A is strictly lower triangular; R and Q read the memory, L writes to
it, and B and C come from the values of the tokens. The inverse of I + A is computed once, by forward substitution.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


class CorrectedChunks(NamedTuple):
    """The terms of all n chunks of c tokens, as named above; None stands for a retention of 1 and additions of 0."""

    system: Float[Tensor, "b h n c c"]
    """A; only what is below its diagonal is read."""
    values: Float[Tensor, "b h n c f"]
    readers: Float[Tensor, "b h n c r"]
    query_pairs: Float[Tensor, "b h n c c"]
    queries: Float[Tensor, "b h n c r"]
    writers: Float[Tensor, "b h n c r"]
    retention: Float[Tensor, "b #h n #r 1"] | None
    additions: Float[Tensor, "b h n r f"] | None = None


def compose_corrected_chunks(
    chunks: CorrectedChunks, memory: Float[Tensor, "b h r f"]
) -> tuple[Float[Tensor, "b h n c f"], Float[Tensor, "b h r f"]]:
    """The outputs Y of all chunks and the memory after the last one."""
    y, last = _ComposeCorrectedChunks.apply(memory, *chunks)  # type: ignore[no-untyped-call]
    return y, last


class _ComposeCorrectedChunks(torch.autograd.Function):
    """Saves its inputs, the inverses, the corrections and the memories, each about as large as an input."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        system, values, readers, query_pairs, queries, writers, retention, additions = CorrectedChunks(*inputs)  # type: ignore[arg-type]
        identity = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
        inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
        read = inverse @ readers
        corrected = inverse @ values
        memories = memory.new_empty(*system.shape[:3], *memory.shape[2:])
        last = torch.empty_like(memory, memory_format=torch.contiguous_format)
        before = _chunk_list(memories)
        before[0].copy_(memory.flatten(0, 1))
        after = [*before[1:], last.flatten(0, 1)]
        passed = zip(_chunk_list(retention, memories), _chunk_list(additions, memories))
        chunks = zip(_chunk_list(read), _chunk_list(corrected), _chunk_list(writers), before, after, passed)
        # operations in place on slices: each chunk is so small that allocating takes as long as computing
        for chunk_read, correction, chunk_writers, start, end, (factor, addition) in chunks:
            correction.baddbmm_(chunk_read, start)
            _pass_memory(start, factor, addition, end).baddbmm_(chunk_writers.mT, correction)
        y = query_pairs @ corrected + queries @ memories
        ctx.save_for_backward(readers, query_pairs, queries, writers, retention, inverse, corrected, memories)
        ctx.has_additions = additions is not None
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        readers, query_pairs, queries, writers, retention, inverse, corrected, memories = ctx.saved_tensors
        # with the gradient D of the memory after a chunk: dZ = P^T dY + L D, and (I + A)^T dB = dZ
        dvalues = inverse.mT @ (query_pairs.mT @ dy)
        dmemories = queries.mT @ dy
        solved_writers = inverse.mT @ writers
        chunks = zip(
            *(_chunk_list(x) for x in (dvalues, dmemories, solved_writers, readers)), _chunk_list(retention, memories)
        )
        dafter = dlast.flatten(0, 1)
        for dvalue, dbefore, chunk_writers, chunk_readers, factor in reversed(list(chunks)):
            dvalue.baddbmm_(chunk_writers, dafter)
            dbefore.add_(dafter) if factor is None else dbefore.addcmul_(dafter, factor)
            dafter = dbefore.baddbmm_(chunk_readers.mT, dvalue)
        # the gradients of the memories after the chunks
        dends = torch.cat([dmemories[:, :, 1:], dlast[:, :, None]], 2)
        return (
            dmemories[:, :, 0],
            (dvalues @ corrected.mT).neg_().tril_(-1),
            dvalues,
            dvalues @ memories.mT,
            dy @ corrected.mT,
            dy @ memories.mT,
            corrected @ dends.mT,
            None if retention is None else (dends * memories).sum_to_size(retention.shape),
            dends if ctx.has_additions else None,
        )


def _chunk_list(x: Float[Tensor, "b #h n *c"] | None, like: Tensor | None = None) -> Sequence[Any]:
    """The chunks of all heads of all rows (b h, *c); None for each chunk of `like` where there is no tensor."""
    if x is None:
        assert like is not None
        return [None] * like.shape[2]
    if like is None:
        heads = x
    else:
        heads = x.expand(-1, like.shape[1], *x.shape[2:])
    return heads.flatten(0, 1).unbind(1)


def _pass_memory(memory: Tensor, factor: Tensor | None, addition: Tensor | None, out: Tensor) -> Tensor:
    """`memory` times `factor`, plus `addition`, each of which may be missing."""
    # torch.compile ends a graph at the `out` of an operation that is not one piece of memory
    if factor is None:
        if addition is None:
            return out.copy_(memory)
        return out.copy_(memory).add_(addition)
    if addition is None:
        return out.copy_(memory).mul_(factor)
    return out.copy_(addition).addcmul_(memory, factor)
