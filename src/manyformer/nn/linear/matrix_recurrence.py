"""A memory matrix that each token decays, corrects and adds to: the recurrence of today's linear attention.

With the memory S (r x f), log decays g, one per token or one per feature channel, and D_t = diag(exp g_t),

    S_t = D_t S_(t-1) + k_t v_t^T,    y_t = S_t^T q_t                                    decay   (arXiv:2312.06635)
    S_t = D_t S_(t-1) + b_t k_t (v_t - (D_t S_(t-1))^T k_t)^T                            delta   (arXiv:2412.06464)
    S_t = D_t S_(t-1) - u_t (w_t^T S_(t-1)) + k_t v_t^T                                  general (arXiv:2503.14456)

The general form reads the memory before its decay. `run` numbers the documents of a row from 0 on;
only run 0 continues from the `memory` argument, every later one starts from zeros.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyformer.nn.linear.chunk_decays import decayed_chunks
from manyformer.nn.runtime.device_reads import reads_are_free
from manyformer.nn.runtime.one_operation import OneOperation
from manyformer.nn.runtime.torch_internals import is_compiled_for_any, is_traced

MAX_EXPONENT = 60.0
"""exp of it, times any feature, is far from overflow in float32."""

MIN_CHUNK = 16
"""The shortest chunks of a recurrence with strong decays per channel, whose pairs cost a product per channel."""


class Removal(NamedTuple):
    """The vectors of the general form: what w reads in the memory is removed along u."""

    w: Float[Tensor, "b h l r"]
    u: Float[Tensor, "b h l r"]


class RecurrenceResult(NamedTuple):
    """Outputs, and the memory after the last token."""

    y: Float[Tensor, "b h l f"]
    memory: Float[Tensor, "b h r f"]


def recurrent(
    q: Float[Tensor, "b h l r"],
    k: Float[Tensor, "b h l r"],
    v: Float[Tensor, "b h l f"],
    decay: Float[Tensor, "b h l #r"] | None = None,
    run: Int[Tensor, "b l"] | None = None,
    memory: Float[Tensor, "b h r f"] | None = None,
    *,
    strength: Float[Tensor, "b h l"] | None = None,
    removal: Removal | None = None,
) -> RecurrenceResult:
    """The definition: a loop over tokens, also used for decoding; `strength` (b) selects the delta rule."""
    memory = zero_memory(k, v) if memory is None else memory
    outputs = []
    current = 0
    for i in range(q.shape[2]):
        if run is not None:
            # run 0 continues from the memory that was given, every other one from zeros
            same = run[:, i] == (run[:, i - 1] if i else current)
            memory = memory.where(same[:, None, None, None], 0.0)
        removed = None
        if removal is not None:
            # read before the decay of the token, as RWKV-7 does
            removed = removal.u[:, :, i, :, None] * (removal.w[:, :, i, None, :] @ memory)
        if decay is not None:
            memory = memory * decay[:, :, i, :, None].exp()
        value = v[:, :, i, None, :]
        if strength is not None:
            value = strength[:, :, i, None, None] * (value - k[:, :, i, None, :] @ memory)
        if removed is not None:
            memory = memory - removed
        memory = torch.addcmul(memory, k[:, :, i, :, None], value)
        outputs.append((q[:, :, i, None, :] @ memory)[:, :, 0])
    return RecurrenceResult(torch.stack(outputs, dim=2), memory)


def chunked(
    q: Float[Tensor, "b h l r"],
    k: Float[Tensor, "b h l r"],
    v: Float[Tensor, "b h l f"],
    decay: Float[Tensor, "b h l #r"] | None = None,
    run: Int[Tensor, "b l"] | None = None,
    memory: Float[Tensor, "b h r f"] | None = None,
    *,
    strength: Float[Tensor, "b h l"] | None = None,
    removal: Removal | None = None,
    chunk: int = 64,
) -> RecurrenceResult:
    """Chunks in parallel: what they write is an affine function of the memory before them, and a loop composes these.

    Within a chunk the corrections of all tokens solve one triangular system (`corrected_chunks`)."""
    length = q.shape[2]
    memory = zero_memory(k, v) if memory is None else memory
    if removal is not None and decay is not None:
        # early readers have factors of channels: one decay per token is taken for all of them
        decay = decay.expand_as(k)
    chunk, is_exact = _select_chunk(chunk_of(length, chunk), decay)
    queries, keys, values = (_split_chunks(x, chunk) for x in (q, k, v))
    decays = None
    if decay is not None:
        decays = _split_chunks(decay, chunk)
    runs = None if run is None else _split_runs(run, chunk)
    parts = _Chunks(queries, keys, values, decays, runs, is_exact)
    if strength is not None:
        y, memory = _chunked_delta(parts, _split_chunks(strength[..., None], chunk), memory)
    elif removal is not None:
        w, u = (_split_chunks(x, chunk) for x in removal)
        y, memory = _chunked_general(parts, w, u, memory)
    else:
        y, memory = _chunked_decay(parts, memory)
    return RecurrenceResult(y.flatten(2, 3)[:, :, :length], memory)


class _Chunks(NamedTuple):
    """Queries, keys, values, log decays and documents of all chunks; `is_exact` says how decays are multiplied."""

    queries: Float[Tensor, "b h n c r"]
    keys: Float[Tensor, "b h n c r"]
    values: Float[Tensor, "b h n c f"]
    decays: Float[Tensor, "b h n c #r"] | None
    runs: Int[Tensor, "b 1 n c"] | None
    is_exact: bool


def _chunked_delta(parts: _Chunks, strength: Float[Tensor, "b h n c 1"], memory: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule: each token writes the difference of its value from what the memory has for its key."""
    readers_of_keys = strength * parts.keys
    chunks = decayed_chunks(
        [parts.queries, readers_of_keys], [parts.keys], parts.decays, parts.runs, is_exact=parts.is_exact
    )
    rows, readers = chunks.rows
    entered, entered_readers = chunks.entered
    (columns,) = chunks.columns
    # I + A with A_ij = b_i (k_i . k_j) decays: how each token's correction depends on those before it in the chunk
    system = chunks.system(readers, columns)
    query_pairs = chunks.pairs(rows, columns)
    left = chunks.leave(columns)
    retention = chunks.retention
    terms = CorrectedChunks(system, strength * parts.values, -entered_readers, query_pairs, entered, left, retention)
    return compose_corrected_chunks(terms, memory)


def _chunked_general(
    parts: _Chunks, w: Float[Tensor, "b h n c r"], u: Float[Tensor, "b h n c r"], memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The general form: what `w` reads in the memory is removed along `u`."""
    chunks = decayed_chunks(
        [parts.queries], [parts.keys, u], parts.decays, parts.runs, is_exact=parts.is_exact, early_readers=[w]
    )
    entered, entered_readers = chunks.entered
    columns, removed = chunks.columns
    blocks = chunks.pair_blocks()
    terms = CorrectedChunks(
        blocks.system,
        blocks.readers_of_keys @ parts.values,
        entered_readers,
        blocks.queries_of_removals,
        entered,
        chunks.remove(removed),
        chunks.retention,
        chunks.leave(columns).mT @ parts.values,
    )
    y, memory = compose_corrected_chunks(terms, memory)
    # what the tokens of the chunk add themselves; `compose_corrected_chunks` knows the memory and the removals
    return y + blocks.queries_of_keys @ parts.values, memory


def _chunked_decay(parts: _Chunks, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Decays alone: without corrections a chunk's contribution does not depend on the memory before it."""
    chunks = decayed_chunks([parts.queries], [parts.keys], parts.decays, parts.runs, is_exact=parts.is_exact)
    (rows,) = chunks.rows
    (entered,) = chunks.entered
    (columns,) = chunks.columns
    # one sum over chunks
    memories, memory = _compose(chunks.leave(columns).mT @ parts.values, chunks.retention, memory)
    return chunks.pairs(rows, columns) @ parts.values + entered @ memories, memory


def chunk_of(length: int, chunk: int) -> int:
    """The tokens of a chunk: `chunk`, or the length of a shorter text."""
    if torch.compiler.is_exporting():
        # one chunk, as the number of chunks would be fixed
        return length
    if is_compiled_for_any(length):
        # sizes within a chunk are numbers, and the number of chunks is any
        return chunk
    return min(chunk, length)


def zero_memory(k: Tensor, v: Tensor) -> Float[Tensor, "b h r f"]:
    """The memory before any token."""
    return v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])


def _split_chunks(x: Float[Tensor, "b h l e"], chunk: int) -> Float[Tensor, "b h n c e"]:
    """Chunks of tokens, the last one filled up with zeros, which leave a memory as it is."""
    # once here, instead of in every product that reads them
    return _view_chunks(x.contiguous(), chunk)


def _view_chunks(x: Float[Tensor, "b h l e"], chunk: int) -> Float[Tensor, "b h n c e"]:
    chunks = -(-x.shape[2] // chunk)
    missing = chunks * chunk - x.shape[2]
    if missing:
        padded = F.pad(x, (0, 0, 0, missing))
    else:
        padded = x
    return padded.unflatten(2, (chunks, chunk))  # type: ignore[no-untyped-call,no-any-return]


def _split_runs(run: Int[Tensor, "b l"], chunk: int) -> Int[Tensor, "b 1 n c"]:
    filled = torch.cat([run, run[:, -1:].expand(-1, -run.shape[1] % chunk)], dim=1)
    return filled.view(run.shape[0], 1, -1, chunk)


def _select_chunk(chunk: int, decay: Tensor | None) -> tuple[int, bool]:
    """The length of chunks, and whether decays per channel may be too strong to be split into two factors of a pair.

    The factors of any strength take longer, but no longer than to wait for a device or to end a compiled graph."""
    if decay is None or decay.shape[-1] == 1 or decay.is_meta:
        return chunk, False
    if is_traced() or not reads_are_free(decay):
        return chunk, True
    shorter = chunk
    while float(_view_chunks(decay.detach(), shorter).sum(-2).amin()) < -MAX_EXPONENT:
        if shorter <= MIN_CHUNK:
            return chunk, True
        shorter = max(MIN_CHUNK, shorter // 2)
    return shorter, False


class CorrectedChunks(NamedTuple):
    """The terms of all n chunks of c tokens whose tokens correct the memory.

    With the memory S before a chunk, the corrections Z of its tokens, its outputs Y and the memory S' after it are

        (I + A) Z = B + R S,    Y = P Z + Q S,    S' = d S + L^T Z + C

    (Yang et al. 2024, arXiv:2406.06484, section 3.2). A is strictly lower triangular; R and Q read the memory, L writes
    to it, and B and C come from the values of the tokens. The inverse of I + A is computed once, by forward
    substitution. None stands for a retention d of 1 and additions C of 0."""

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
    y, last = _ComposeCorrectedChunks.call(memory, *chunks)
    return y, last


class _ComposeCorrectedChunks(OneOperation):
    """Saves its inputs, the inverses, the corrections and the memories, each about as large as an input."""

    @classmethod
    def loops(cls, *arguments: Any) -> int:
        _, system, *_ = arguments
        chunks: int = system.shape[2]
        return chunks

    @classmethod
    def empty_results(cls, *arguments: Any) -> list[Tensor]:
        memory, *inputs = arguments
        values = CorrectedChunks(*inputs).values
        return [values.new_empty(values.shape), memory.new_empty(memory.shape)]

    @staticmethod
    def forward(ctx: Any, memory: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        system, values, readers, query_pairs, queries, writers, retention, additions = CorrectedChunks(*inputs)  # type: ignore[arg-type]
        identity = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
        inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
        read = inverse @ readers
        corrected = inverse @ values
        memories = memory.new_empty(*system.shape[:3], *memory.shape[2:])
        last = torch.empty_like(memory, memory_format=torch.contiguous_format)
        memories_before = _chunk_list(memories)
        memories_before[0].copy_(memory.flatten(0, 1))
        memories_after = [*memories_before[1:], last.flatten(0, 1)]
        passed = zip(_chunk_list(retention, memories), _chunk_list(additions, memories))
        chunks = zip(
            _chunk_list(read), _chunk_list(corrected), _chunk_list(writers), memories_before, memories_after, passed
        )
        # operations in place on slices: each chunk is so small that allocating takes as long as computing
        for chunk_read, correction, chunk_writers, start, end, (factor, addition) in chunks:
            correction.baddbmm_(chunk_read, start)
            _pass_memory(start, factor, addition, end).baddbmm_(chunk_writers.mT, correction)
        y = query_pairs @ corrected + queries @ memories
        ctx.save_for_backward(readers, query_pairs, queries, writers, retention, inverse, corrected, memories)
        ctx.has_additions = additions is not None
        return y, last

    @staticmethod
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

    @classmethod
    def plain(cls, *arguments: Any) -> tuple[Tensor, Tensor]:
        memory, *inputs = arguments
        chunks = CorrectedChunks(*inputs)
        identity = torch.eye(chunks.system.shape[-1], dtype=memory.dtype, device=memory.device)
        system = chunks.system.tril(-1) + identity
        outputs = []
        for i in range(system.shape[2]):
            right_side = chunks.values[:, :, i] + chunks.readers[:, :, i] @ memory
            corrections = torch.linalg.solve_triangular(system[:, :, i], right_side, upper=False, unitriangular=True)
            outputs.append(chunks.query_pairs[:, :, i] @ corrections + chunks.queries[:, :, i] @ memory)
            if chunks.retention is not None:
                memory = memory * chunks.retention[:, :, i]
            memory = memory + chunks.writers[:, :, i].mT @ corrections
            if chunks.additions is not None:
                memory = memory + chunks.additions[:, :, i]
        return torch.stack(outputs, 2), memory


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


def _compose(
    additions: Float[Tensor, "b h n r f"], retention: Float[Tensor, "b #h n #r 1"] | None, memory: Tensor
) -> tuple[Float[Tensor, "b h n r f"], Float[Tensor, "b h r f"]]:
    """The memories before each chunk, S_(n+1) = retention_n S_n + additions_n, and the last one."""
    if retention is None:
        retention = additions.new_ones(()).expand(*additions.shape[:3], 1, 1)
    memories, last = _ComposeChunks.call(additions, retention, memory)
    return memories, last


class _ComposeChunks(OneOperation):
    @classmethod
    def loops(cls, *arguments: Any) -> int:
        additions, _, _ = arguments
        chunks: int = additions.shape[2]
        return chunks

    @classmethod
    def empty_results(cls, *arguments: Any) -> list[Tensor]:
        additions, _, memory = arguments
        return [additions.new_empty(additions.shape), memory.new_empty(memory.shape)]

    @staticmethod
    def forward(ctx: Any, additions: Tensor, retention: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        memories = torch.empty_like(additions)
        for i in range(additions.shape[2]):
            memories[:, :, i] = memory
            memory = torch.addcmul(additions[:, :, i], memory, retention[:, :, i])
        ctx.save_for_backward(retention, memories)
        return memories, memory

    @staticmethod
    def backward(ctx: Any, dmemories: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        retention, memories = ctx.saved_tensors
        dadditions = torch.empty_like(memories)
        for i in reversed(range(memories.shape[2])):
            dadditions[:, :, i] = dlast
            dlast = torch.addcmul(dmemories[:, :, i], dlast, retention[:, :, i])
        dretention = None
        if ctx.needs_input_grad[1]:
            dretention = (dadditions * memories).sum_to_size(retention.shape)
        return dadditions, dretention, dlast

    @classmethod
    def plain(cls, *arguments: Any) -> tuple[Tensor, Tensor]:
        additions, retention, memory = arguments
        memories = []
        for i in range(additions.shape[2]):
            memories.append(memory)
            memory = torch.addcmul(additions[:, :, i], memory, retention[:, :, i])
        return torch.stack(memories, 2), memory
