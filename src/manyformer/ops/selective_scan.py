"""The selective scan of Mamba (Gu and Dao 2023, arXiv:2312.00752, section 3.2): a small memory of each channel.

With step sizes dt (one per channel), rates a <= 0 (one per channel n and entry s), writes b and reads c, which all
channels share, the memory h (n x s) of a row and its outputs are

    h_t[n, s] = exp(dt_t[n] a[n, s]) h_(t-1)[n, s] + dt_t[n] x_t[n] b_t[s],    y_t[n] = sum over s of c_t[s] h_t[n, s]

Every entry decays at its own rate, so that tokens of a chunk do not meet in one matrix product, as they do in
`matrix_recurrence`. A step size of 0 leaves the memory as it is, which padding needs.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyformer.compilation import compiler_disabled
from manyformer.costs.cost_model import COSTS

SCAN_CHUNK = COSTS.selective_scan_chunk
SCAN_ELEMENTS = COSTS.selective_scan_elements


class SelectiveScanResult(NamedTuple):
    """Outputs, and the memory after the last token."""

    y: Float[Tensor, "b l n"]
    memory: Float[Tensor, "b n s"]


def selective_scan_reference(
    x: Float[Tensor, "b l n"],
    steps: Float[Tensor, "b l n"],
    rates: Float[Tensor, "n s"],
    writes: Float[Tensor, "b l s"],
    reads: Float[Tensor, "b l s"],
    memory: Float[Tensor, "b n s"],
    starts: Bool[Tensor, "b l"] | None = None,
) -> SelectiveScanResult:
    """The definition, a loop over tokens; the memory is emptied before each token of `starts`."""
    outputs = []
    for i in range(x.shape[1]):
        if starts is not None:
            memory = memory.masked_fill(starts[:, i, None, None], 0.0)
        decay = (steps[:, i, :, None] * rates).exp()
        memory = decay * memory + (steps[:, i] * x[:, i])[..., None] * writes[:, i, None]
        outputs.append((memory * reads[:, i, None]).sum(-1))
    return SelectiveScanResult(torch.stack(outputs, 1), memory)


# outside compiled code, which would unroll every token and recompile for every length
@compiler_disabled
def selective_scan(
    x: Float[Tensor, "b l n"],
    steps: Float[Tensor, "b l n"],
    rates: Float[Tensor, "n s"],
    writes: Float[Tensor, "b l s"],
    reads: Float[Tensor, "b l s"],
    memory: Float[Tensor, "b n s"],
    starts: Bool[Tensor, "b l"] | None = None,
    *,
    chunk: int = SCAN_CHUNK,
) -> SelectiveScanResult:
    """`selective_scan_reference` with one product for each token: all else is computed for a chunk of tokens at once.

    For gradients only the memories before the chunks are stored, and those within a chunk are computed again. On a CPU
    as many rows are scanned together as keep the memories of a chunk in its caches."""
    results = []
    for rows in _row_groups(x, rates, chunk):
        by_time = (part[rows].transpose(0, 1).contiguous() for part in (x, steps, writes, reads))
        kept = None if starts is None else (~starts[rows]).to(x.dtype).mT[..., None, None]
        results.append(_SelectiveScan.apply(*by_time, rates, memory[rows], kept, chunk))  # type: ignore[no-untyped-call]
    y, memory = (torch.cat(parts, dim) for parts, dim in zip(zip(*results), (1, 0)))
    return SelectiveScanResult(y.transpose(0, 1), memory)


def _row_groups(x: Float[Tensor, "b l n"], rates: Float[Tensor, "n s"], chunk: int) -> list[slice]:
    """The rows that are scanned together, at least one in each group."""
    elements = max(min(chunk, x.shape[1]) * rates.numel(), 1)
    rows = max(SCAN_ELEMENTS // elements if x.device.type == "cpu" else len(x), 1)
    return [slice(first, first + rows) for first in range(0, max(len(x), 1), rows)]


class _Chunk(NamedTuple):
    """Tokens of a chunk, and their decays and memories; time comes first."""

    x: Float[Tensor, "c b n"]
    steps: Float[Tensor, "c b n"]
    writes: Float[Tensor, "c b s"]
    reads: Float[Tensor, "c b s"]
    decay: Float[Tensor, "c b n s"]
    memories: Float[Tensor, "c b n s"]

    @classmethod
    def of(
        cls, tokens: tuple[Tensor, ...], rates: Tensor, memory: Tensor, kept: Tensor | None, columns: slice
    ) -> "_Chunk":
        """The chunk at these columns, which continues `memory`."""
        x, steps, writes, reads = (part[columns] for part in tokens)
        decay = (steps[..., None] * rates).exp_()
        if kept is not None:
            decay *= kept[columns]
        memories = (steps * x)[..., None] * writes[..., None, :]
        for i in range(len(x)):
            memory = memories[i].addcmul_(decay[i], memory)
        return cls(x, steps, writes, reads, decay, memories)


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        steps: Tensor,
        writes: Tensor,
        reads: Tensor,
        rates: Tensor,
        memory: Tensor,
        kept: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        tokens, y, initial = (x, steps, writes, reads), torch.empty_like(x), []
        for columns in _chunks(len(x), chunk):
            initial.append(memory)
            part = _Chunk.of(tokens, rates, memory, kept, columns)
            torch.matmul(part.memories, part.reads[..., None], out=y[columns, ..., None])
            memory = part.memories[-1].clone()
        ctx.save_for_backward(*tokens, rates, kept, *initial)
        ctx.chunk = chunk
        return y, memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dmemory: Tensor) -> tuple[Tensor | None, ...]:
        x, steps, writes, reads, rates, kept, *initial = ctx.saved_tensors
        tokens, grads = (x, steps, writes, reads), [torch.empty_like(part) for part in (x, steps, writes, reads)]
        drates = torch.zeros_like(rates)
        for columns, memory in reversed(list(zip(_chunks(len(x), ctx.chunk), initial, strict=True))):
            part = _Chunk.of(tokens, rates, memory, kept, columns)
            dmemories = dy[columns, ..., None] * part.reads[..., None, :]
            for i in reversed(range(len(part.x))):
                dmemory = dmemories[i].add_(dmemory) * part.decay[i]
            token_grads, chunk_drates = _chunk_gradients(part, dy[columns], dmemories, memory, rates)
            drates += chunk_drates
            for grad, chunk_grad in zip(grads, token_grads):
                grad[columns] = chunk_grad
        return *grads, drates, dmemory, None, None


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _chunk_gradients(
    part: _Chunk, dy: Tensor, dmemories: Tensor, memory: Tensor, rates: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients of a chunk's x, steps, writes and reads, and of the rates; `memory` precedes the chunk."""
    dreads = (dy[..., None, :] @ part.memories)[..., 0, :]
    dwrites = ((part.steps * part.x)[..., None, :] @ dmemories)[..., 0, :]
    dwritten = (dmemories @ part.writes[..., None])[..., 0]
    exponents = dmemories * part.decay * torch.cat([memory[None], part.memories[:-1]])
    drates = (exponents * part.steps[..., None]).sum((0, 1))
    dsteps = (exponents * rates).sum(-1) + dwritten * part.x
    return (dwritten * part.steps, dsteps, dwrites, dreads), drates
