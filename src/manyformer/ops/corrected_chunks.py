"""Chunks of a memory whose tokens correct it: the triangular system of each chunk and the loop that joins them.

With the memory S before a chunk, the corrections Z of its tokens, its outputs Y and the memory S' after it are

    (I + A) Z = B + R S,    Y = P Z + Q S,    S' = d S + L^T Z + C

(Yang et al. 2024, arXiv:2406.06484, section 3.2). A is strictly lower triangular; R and Q read the memory, L writes to
it, and B and C come from the values of the tokens. The inverse of I + A is computed once, by forward substitution.
"""

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
        read, corrected = inverse @ readers, inverse @ values
        memories = memory.new_empty(*system.shape[:3], *memory.shape[2:])
        for i in range(system.shape[2]):
            memories[:, :, i] = memory
            corrected[:, :, i] += read[:, :, i] @ memory
            kept = memory if retention is None else memory * retention[:, :, i]
            kept = kept if additions is None else kept + additions[:, :, i]
            memory = kept + writers[:, :, i].mT @ corrected[:, :, i]
        y = query_pairs @ corrected + queries @ memories
        ctx.save_for_backward(readers, query_pairs, queries, writers, retention, inverse, corrected, memories)
        ctx.has_additions = additions is not None
        return y, memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        readers, query_pairs, queries, writers, retention, inverse, corrected, memories = ctx.saved_tensors
        # with the gradient D of the memory after a chunk: dZ = P^T dY + L D, and (I + A)^T dB = dZ
        dvalues, dbefore = inverse.mT @ (query_pairs.mT @ dy), queries.mT @ dy
        solved_writers = inverse.mT @ writers
        dafter = torch.empty_like(memories)
        for i in reversed(range(memories.shape[2])):
            dafter[:, :, i] = dlast
            dvalues[:, :, i] += solved_writers[:, :, i] @ dlast
            kept = dlast if retention is None else dlast * retention[:, :, i]
            dlast = dbefore[:, :, i] + kept + readers[:, :, i].mT @ dvalues[:, :, i]
        return (
            dlast,
            (dvalues @ corrected.mT).neg_().tril_(-1),
            dvalues,
            dvalues @ memories.mT,
            dy @ corrected.mT,
            dy @ memories.mT,
            corrected @ dafter.mT,
            None if retention is None else (dafter * memories).sum_to_size(retention.shape),
            dafter if ctx.has_additions else None,
        )
