"""The selective scan of Mamba (Gu and Dao 2023, arXiv:2312.00752, section 3.2): a small memory of each channel.

With step sizes dt (one per channel), rates a <= 0 (one per channel n and entry s), writes b and reads c, which all
channels share, the memory h (n x s) of a row and its outputs are

    h_t[n, s] = exp(dt_t[n] a[n, s]) h_(t-1)[n, s] + dt_t[n] x_t[n] b_t[s],    y_t[n] = sum over s of c_t[s] h_t[n, s]

With `signed` the factor of the memory before is 2 exp(dt a) - 1, between -1 and 1, in place of exp(dt a) (Grazzi et al.
2024, arXiv:2411.12537, section 4): a memory can change its sign, which counting modulo 2 needs.

Every entry decays at its own rate, so that tokens of a chunk do not meet in one matrix product, as they do in
`matrix_recurrence`. A step size of 0 leaves the memory as it is, which padding needs.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.nn.ops.any_length import scan_any_length
from manyformer.nn.runtime.device_reads import ScratchBuffer
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient, needs_plain_operations
from manyformer.nn.runtime.torch_internals import compiler_disabled, is_of_any_size

SCAN_CHUNK = 16
"""Tokens whose memories a selective scan holds at once; for gradients those before each chunk are stored."""

SCAN_ELEMENTS = 1 << 19
"""Numbers in the memories of a chunk on a CPU: as many rows are scanned together as have no more."""


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
    *,
    signed: bool = False,
) -> SelectiveScanResult:
    """The definition, a loop over tokens; the memory is emptied before each token of `starts`."""
    outputs = []
    for i in range(x.shape[1]):
        if starts is not None:
            memory = memory.masked_fill(starts[:, i, None, None], 0.0)
        decay = (steps[:, i, :, None] * rates).exp()
        if signed:
            decay = 2 * decay - 1
        memory = decay * memory + (steps[:, i] * x[:, i])[..., None] * writes[:, i, None]
        outputs.append((memory * reads[:, i, None]).sum(-1))
    return SelectiveScanResult(torch.stack(outputs, 1), memory)


def _scan_any_length(
    x: Tensor, steps: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, memory: Tensor, starts: Tensor | None
) -> SelectiveScanResult:
    """`selective_scan_reference` without a loop over tokens, which hold the memories of all of them."""
    decay = (steps[..., None] * rates).exp()
    if starts is not None:
        decay = decay.masked_fill(starts[..., None, None], 0.0)
    written = (steps * x)[..., None] * writes[..., None, :]
    # the memory before the first token counts as what a token has written
    written = torch.cat([memory[:, None], written], 1)
    decay = torch.cat([torch.ones_like(memory[:, None]), decay], 1)
    memories, _ = scan_any_length(_later_memory, (written, decay), (0.0, 0.0), 1)
    return SelectiveScanResult((memories[:, 1:] * reads[..., None, :]).sum(-1), memories[:, -1])


def _later_memory(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What two parts of a text write and how they decay, together."""
    return later[0] + later[1] * earlier[0], later[1] * earlier[1]


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
    signed: bool = False,
    chunk: int = SCAN_CHUNK,
) -> SelectiveScanResult:
    """`selective_scan_reference` with one product for each token: all else is computed for a chunk of tokens at once.

    For gradients only the memories before the chunks are stored, and those within a chunk are computed again. On a CPU
    as many rows are scanned together as keep the memories of a chunk in its caches."""
    if is_of_any_size(x.shape[1]):
        return _scan_any_length(x, steps, rates, writes, reads, memory, starts)
    if needs_plain_operations():
        return selective_scan_reference(x, steps, rates, writes, reads, memory, starts, signed=signed)
    keep_mask = None if starts is None else (~starts).to(x.dtype)
    rows = _row_groups(x, rates, chunk)
    options = _ScanOptions(rows, chunk, signed)
    return SelectiveScanResult(*_SelectiveScan.call(x, steps, writes, reads, rates, memory, keep_mask, options))


def _row_groups(x: Float[Tensor, "b l n"], rates: Float[Tensor, "n s"], chunk: int) -> list[slice]:
    """The rows that are scanned together, at least one in each group."""
    # rates are (channels, states): times tokens of a chunk, the size of what a row holds at once
    elements = max(min(chunk, x.shape[1]) * rates.numel(), 1)
    rows = max(SCAN_ELEMENTS // elements if x.device.type == "cpu" else len(x), 1)
    return [slice(first, first + rows) for first in range(0, max(len(x), 1), rows)]


class _ScanOptions(NamedTuple):
    """The rows that are scanned together, the tokens of a chunk, and whether decays may be negative."""

    row_groups: list[slice]
    chunk: int
    signed: bool


class _ScanTokens(NamedTuple):
    """The inputs of the scan that tokens decide."""

    x: Float[Tensor, "... n"]
    steps: Float[Tensor, "... n"]
    writes: Float[Tensor, "... s"]
    reads: Float[Tensor, "... s"]


class _Chunk(NamedTuple):
    """Tokens of a chunk, and their decays and memories; time comes first.

    `slope` is the gradient of the decays by their exponents, if it is another than the decays themselves."""

    tokens: _ScanTokens
    decay: Float[Tensor, "c b n s"]
    memories: Float[Tensor, "c b n s"]
    slope: Float[Tensor, "c b n s"] | None

    def gradients(
        self, dy: Tensor, dmemories: Tensor, decayed: Tensor, memory: Tensor, rates: Tensor
    ) -> tuple[_ScanTokens, Tensor]:
        """The gradients of the tokens and of the rates; `memory` precedes the chunk.

        `decayed` is the product of `dmemories` and decays, and is overwritten."""
        x, steps, writes, _ = self.tokens
        dreads = (dy[..., None, :] @ self.memories)[..., 0, :]
        dwrites = ((steps * x)[..., None, :] @ dmemories)[..., 0, :]
        dwritten = (dmemories @ writes[..., None])[..., 0]
        # d(decay) = dM_t M_(t-1) and decay = exp(step rate), so that its exponent has the gradient dM_t decay M_(t-1)
        if self.slope is None:
            exponents = decayed
        else:
            exponents = torch.mul(dmemories, self.slope, out=decayed)
        exponents[0] *= memory
        exponents[1:] *= self.memories[:-1]
        dsteps = torch.mul(exponents, rates, out=dmemories).sum(-1) + dwritten * x
        drates = exponents.mul_(steps[..., None]).sum((0, 1))
        return _ScanTokens(dwritten * steps, dsteps, dwrites, dreads), drates


class _Rows(NamedTuple):
    """Rows that are scanned together; time comes first."""

    tokens: _ScanTokens
    rates: Float[Tensor, "n s"]
    keep_mask: Float[Tensor, "l b 1 1"] | None
    options: _ScanOptions
    scratch: ScratchBuffer

    @classmethod
    def of(
        cls,
        tokens: _ScanTokens,
        keep_mask: Tensor | None,
        rows: slice,
        rates: Tensor,
        options: _ScanOptions,
        scratch: ScratchBuffer,
    ) -> "_Rows":
        """The rows at this slice of tensors whose first axis is that of rows."""
        by_time = _ScanTokens(*(part[rows].transpose(0, 1).contiguous() for part in tokens))
        if keep_mask is not None:
            keep_mask = keep_mask[rows].mT[..., None, None]
        return cls(by_time, rates, keep_mask, options, scratch)

    @property
    def chunks(self) -> list[slice]:
        """The columns of each chunk."""
        length = len(self.tokens.x)
        chunk = self.options.chunk
        return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]

    def chunk_at(self, columns: slice, memory: Float[Tensor, "b n s"]) -> _Chunk:
        """The chunk at these columns, which continues `memory`; valid until the next one."""
        tokens = _ScanTokens(*(part[columns] for part in self.tokens))
        x, steps, writes, _ = tokens
        shape = (*x.shape, writes.shape[-1])
        decay = torch.mul(steps[..., None], self.rates, out=self.scratch("decay", *shape)).exp_()
        slope = None
        if self.options.signed:
            slope = torch.mul(decay, 2.0, out=self.scratch("slope", *shape))
            torch.sub(slope, 1.0, out=decay)
        if self.keep_mask is not None:
            # a first token of a document keeps nothing of the memory before it
            decay *= self.keep_mask[columns]
            if slope is not None:
                slope *= self.keep_mask[columns]
        memories = torch.mul((steps * x)[..., None], writes[..., None, :], out=self.scratch("memories", *shape))
        for i in range(len(x)):
            memory = memories[i].addcmul_(decay[i], memory)
        return _Chunk(tokens, decay, memories, slope)

    def scan(self, memory: Float[Tensor, "b n s"]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The outputs, the last memory, and the memories before the chunks."""
        y = torch.empty_like(self.tokens.x)
        initial = []
        for columns in self.chunks:
            initial.append(memory)
            part = self.chunk_at(columns, memory)
            torch.matmul(part.memories, part.tokens.reads[..., None], out=y[columns, ..., None])
            # the buffer is overwritten by the next chunk
            memory = part.memories[-1].clone()
        return y, memory, initial

    def gradients(self, initial: Sequence[Tensor], dy: Tensor, dmemory: Tensor) -> tuple[Tensor, ...]:
        """The gradients of x, steps, writes, reads, rates, and of the memory before the first token."""
        token_grads = [torch.empty_like(part) for part in self.tokens]
        drates = torch.zeros_like(self.rates)
        for columns, memory in reversed(list(zip(self.chunks, initial, strict=True))):
            part = self.chunk_at(columns, memory)
            dmemories, decayed = (self.scratch(name, *part.memories.shape) for name in ("dmemories", "decayed"))
            torch.mul(dy[columns, ..., None], part.tokens.reads[..., None, :], out=dmemories)
            for i in reversed(range(len(dmemories))):
                dmemory = torch.mul(dmemories[i].add_(dmemory), part.decay[i], out=decayed[i])
            dmemory = dmemory.clone()
            chunk_grads, chunk_drates = part.gradients(dy[columns], dmemories, decayed, memory, self.rates)
            drates += chunk_drates
            for grad, chunk_grad in zip(token_grads, chunk_grads):
                grad[columns] = chunk_grad
        return *token_grads, drates, dmemory


class _SelectiveScan(HandwrittenGradient):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        steps: Tensor,
        writes: Tensor,
        reads: Tensor,
        rates: Tensor,
        memory: Tensor,
        keep_mask: Tensor | None,
        options: _ScanOptions,
    ) -> tuple[Tensor, Tensor]:
        tokens = _ScanTokens(x, steps, writes, reads)
        scratch = ScratchBuffer(x)
        results = [
            _Rows.of(tokens, keep_mask, rows, rates, options, scratch).scan(memory[rows]) for rows in options.row_groups
        ]
        outputs, memories, initial = zip(*results)
        ctx.save_for_backward(*tokens, rates, keep_mask, *itertools.chain(*initial))
        ctx.options = options
        return torch.cat(outputs, 1).transpose(0, 1), torch.cat(memories)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dmemory: Tensor) -> tuple[Tensor | None, ...]:
        x, steps, writes, reads, rates, keep_mask, *initial = ctx.saved_tensors
        tokens = _ScanTokens(x, steps, writes, reads)
        scratch = ScratchBuffer(x)
        results = []
        for i, rows in enumerate(ctx.options.row_groups):
            group = _Rows.of(tokens, keep_mask, rows, rates, ctx.options, scratch)
            by_time = dy[rows].transpose(0, 1)
            count = len(group.chunks)
            results.append(group.gradients(initial[i * count : (i + 1) * count], by_time, dmemory[rows]))
        *token_grads, drates, dmemories = zip(*results)
        grads = (torch.cat(parts, 1).transpose(0, 1) for parts in token_grads)
        return *grads, sum(drates), torch.cat(dmemories), None, None
