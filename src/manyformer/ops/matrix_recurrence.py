"""A memory matrix that each token decays, corrects and adds to: the recurrence of today's linear attention.

With the memory S (r x f), log decays g, one per token or one per feature channel, and D_t = diag(exp g_t),

    S_t = D_t S_(t-1) + k_t v_t^T,    y_t = S_t^T q_t                                    decay   (arXiv:2312.06635)
    S_t = D_t S_(t-1) + b_t k_t (v_t - (D_t S_(t-1))^T k_t)^T                            delta   (arXiv:2412.06464)
    S_t = D_t S_(t-1) + u_t (w_t^T D_t S_(t-1)) + k_t v_t^T                              general (arXiv:2503.14456)

The delta rule is the general form with u = -b k, w = k and the key b k. `run` numbers the documents of a row from 0 on;
only run 0 continues from the `memory` argument, every later one starts from zeros.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyformer.costs.cost_model import COSTS

MAX_EXPONENT = 60.0
"""exp of it, times any feature, is far from overflow in float32."""
MIN_CHUNK = COSTS.channel_decay_block


class Correction(NamedTuple):
    """The vectors of the general form: w reads the decayed memory, and u receives what it reads."""

    u: Float[Tensor, "b h l r"]
    w: Float[Tensor, "b h l r"]


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
    correction: Correction | None = None,
) -> RecurrenceResult:
    """The definition: a loop over tokens, also used for decoding; `strength` (b) selects the delta rule."""
    memory = zero_memory(k, v) if memory is None else memory
    outputs, current = [], 0
    for i in range(q.shape[2]):
        if run is not None:
            same = run[:, i] == (run[:, i - 1] if i else current)
            memory = memory.where(same[:, None, None, None], 0.0)
        if decay is not None:
            memory = memory * decay[:, :, i, :, None].exp()
        value = v[:, :, i, None, :]
        if strength is not None:
            value = strength[:, :, i, None, None] * (value - k[:, :, i, None, :] @ memory)
        if correction is not None:
            memory = memory + correction.u[:, :, i, :, None] * (correction.w[:, :, i, None, :] @ memory)
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
    correction: Correction | None = None,
    chunk: int = 64,
) -> RecurrenceResult:
    """Chunks in parallel: what they write is an affine function of the memory before them, and a loop composes these.

    Within a chunk the corrections of all tokens solve one triangular system (Yang et al. 2024, arXiv:2406.06484,
    section 3.2), here with the memory before the chunk as further right-hand sides."""
    length, memory = q.shape[2], zero_memory(k, v) if memory is None else memory
    chunk, is_exact = _select_chunk(min(chunk, length), decay)
    queries, keys, values = (split_chunks(x, chunk) for x in (q, k, v))
    decays = None if decay is None else split_chunks(decay, chunk)
    runs = None if run is None else _split_runs(run, chunk)
    factors = _chunk_factors(decays, runs, values, is_exact=is_exact)
    if strength is not None:
        b = split_chunks(strength[..., None], chunk)
        pairs = factors.pairs([keys, queries], [keys])
        read = [b * values, -b * factors.enter(keys)]
        writes = _Writes([keys], *_solve(b * pairs[..., 0, :, 0, :].tril(-1), read))
        query_pairs = pairs[..., 1, :, 0, :]
    elif correction is not None:
        u, w = (split_chunks(x, chunk) for x in correction)
        pairs = factors.pairs([w, queries], [keys, u])
        system, from_values = (pairs[..., 0, :, column, :].tril(-1) for column in (1, 0))
        read_values, read_memory = _solve(-system, [from_values @ values, factors.enter(w)])
        shares = F.pad(read_memory, (0, 0, keys.shape[-2], 0))
        writes = _Writes([keys, u], torch.cat([values, read_values], -2), shares)
        query_pairs = pairs[..., 1, :, :, :].flatten(-2)
    else:
        writes, query_pairs = _Writes([keys], values, None), factors.pairs([queries], [keys])[..., 0, :, 0, :]
    y, memory = _compose(factors, factors.enter(queries), query_pairs, writes, memory)
    return RecurrenceResult(y.flatten(2, 3)[:, :, :length], memory)


def zero_memory(k: Tensor, v: Tensor) -> Float[Tensor, "b h r f"]:
    """The memory before any token."""
    return v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])


def split_chunks(x: Float[Tensor, "b h l e"], chunk: int) -> Float[Tensor, "b h n c e"]:
    """Chunks of tokens, the last one filled up with zeros, which leave a memory as it is."""
    padded = F.pad(x, (0, 0, 0, -x.shape[2] % chunk)) if x.shape[2] % chunk else x
    return padded.unflatten(2, (-1, chunk))  # type: ignore[no-untyped-call,no-any-return]


def _split_runs(run: Int[Tensor, "b l"], chunk: int) -> Int[Tensor, "b 1 n c"]:
    filled = torch.cat([run, run[:, -1:].expand(-1, -run.shape[1] % chunk)], dim=1)
    return filled.view(run.shape[0], 1, -1, chunk)


def _select_chunk(chunk: int, decay: Tensor | None) -> tuple[int, bool]:
    """The length of chunks, and whether decays per channel are too strong to be split into two factors of a pair."""
    if decay is None or decay.shape[-1] == 1 or decay.is_meta:
        return chunk, False
    if torch.compiler.is_compiling():
        # a choice by values would end the graph; this path serves all of them
        return min(chunk, MIN_CHUNK), True
    while True:
        strongest = float(split_chunks(decay.detach(), chunk).sum(-2).amin())
        if strongest >= -MAX_EXPONENT or chunk <= MIN_CHUNK:
            return chunk, strongest < -MAX_EXPONENT
        chunk = max(MIN_CHUNK, chunk // 2)


class _ChunkFactors(NamedTuple):
    """Decay and document masks of chunks; None stands for a factor of 1.

    `entering` is that from the memory before a chunk to a token, `leaving` from a token to the memory after it,
    `retention` that of the memory itself; `total` sums the decays from the start of a chunk. Pairs of a query and a
    key have the factor `table`; with one decay per channel, the product of `total`'s exponential at the query and
    its inverse at the key, or with `is_exact` that of each pair of tokens."""

    table: Float[Tensor, "b #h n c c"] | None
    entering: Float[Tensor, "b h n c #r"] | None
    leaving: Float[Tensor, "b h n c #r"] | None
    retention: Float[Tensor, "b h n #r 1"] | None
    total: Float[Tensor, "b h n c r"] | None
    is_entered: Float[Tensor, "b 1 n c 1"] | None
    is_exact: bool

    def enter(self, x: Float[Tensor, "b h n c r"]) -> Float[Tensor, "b h n c r"]:
        """Readers of the memory before the chunk, with its decay up to them; zeros in later documents."""
        entered = x if self.entering is None else x * self.entering
        return entered if self.is_entered is None else entered * self.is_entered

    def leave(self, x: Float[Tensor, "b h n c r"]) -> Float[Tensor, "b h n c r"]:
        """Keys with the decay after them; zeros for those of earlier documents than the last token's."""
        return x if self.leaving is None else x * self.leaving

    def pairs(self, readers: list[Tensor], keys: list[Tensor]) -> Float[Tensor, "b h n i c j c"]:
        """The decayed products of each reader with all keys up to its token, of the same document."""
        rows, columns = torch.stack(readers, -3), torch.stack(keys, -3)
        if self.total is None:
            pairs = rows.flatten(-3, -2) @ columns.flatten(-3, -2).mT
        elif self.is_exact:
            factors = _pair_factors(self.total)
            pairs = torch.einsum("...aid,...ijd,...bjd->...aibj", rows, factors, columns).flatten(-4, -3).flatten(-2)
        else:
            assert self.entering is not None
            rows, columns = rows * self.entering[..., None, :, :], columns * (-self.total[..., None, :, :]).exp()
            pairs = rows.flatten(-3, -2) @ columns.flatten(-3, -2).mT
        chunk = rows.shape[-2]
        split = pairs.unflatten(-2, (-1, chunk)).unflatten(-1, (-1, chunk)).transpose(-3, -2)  # type: ignore[no-untyped-call]
        visible: Tensor = split.tril() if self.table is None else split * self.table[..., None, None, :, :]
        return visible.transpose(-3, -2)


def channel_decay_pairs(
    a: Float[Tensor, "*b l r"], c: Float[Tensor, "*b l r"], total: Float[Tensor, "*b l r"]
) -> Float[Tensor, "*b l l"]:
    """The definition: the sums over channels of a_i c_j exp(total_i - total_j) where j <= i; `total` sums decays."""
    pairs: Tensor = (a[..., :, None, :] * c[..., None, :, :] * _pair_factors(total)).sum(-1)
    return pairs


def _pair_factors(total: Float[Tensor, "*b l r"]) -> Float[Tensor, "*b l l r"]:
    hidden = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu(1)
    # the exponent of hidden pairs may overflow
    return (total[..., :, None, :] - total[..., None, :, :]).masked_fill(hidden[..., None], -torch.inf).exp()


def _chunk_factors(decay: Tensor | None, runs: Tensor | None, like: Tensor, *, is_exact: bool) -> _ChunkFactors:
    table = entering = leaving = retention = total = is_entered = None
    if decay is not None:
        total = decay.cumsum(-2)
        # backwards, so that small sums after strong decays keep their digits
        remaining = F.pad(decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
        entering, leaving, retention = total.exp(), remaining.exp(), total[..., -1:, :].exp().mT
        if decay.shape[-1] == 1:
            table = (total - total.mT).clamp(max=0.0).exp().tril()
            total = None
    if runs is not None:
        # the memory at the start of a chunk belongs to the last run of the previous chunk
        previous, last = F.pad(runs[:, :, :-1, -1:], (0, 0, 1, 0)), runs[..., -1:]
        same = (runs[..., :, None] == runs[..., None, :]).tril().to(like.dtype)
        table = same if table is None else table * same
        is_entered, is_left = ((runs == end)[..., None].to(like.dtype) for end in (previous, last))
        is_retained = (last == previous)[..., None].to(like.dtype)
        leaving = is_left if leaving is None else leaving * is_left
        retention = is_retained if retention is None else retention * is_retained
    return _ChunkFactors(table, entering, leaving, retention, total, is_entered, is_exact)


def _solve(strict: Float[Tensor, "*b c c"], sides: list[Tensor]) -> list[Tensor]:
    """X with (I + strict) X = side, for strictly lower triangles."""
    widths = [side.shape[-1] for side in sides]
    x = torch.linalg.solve_triangular(strict, torch.cat(sides, -1), upper=False, unitriangular=True)
    return list(x.split(widths, -1))


class _Writes(NamedTuple):
    """The keys that a chunk writes at, side by side, and what it writes: values, plus `shares` times the memory."""

    keys: list[Float[Tensor, "b h n c r"]]
    values: Float[Tensor, "b h n m f"]
    shares: Float[Tensor, "b h n m r"] | None


def _compose(
    factors: _ChunkFactors, entered: Tensor, query_pairs: Tensor, writes: _Writes, memory: Tensor
) -> tuple[Float[Tensor, "b h n c f"], Float[Tensor, "b h r f"]]:
    """Outputs of all chunks and the last memory."""
    left = torch.cat([factors.leave(keys) for keys in writes.keys], -2).mT
    additions, transitions = left @ writes.values, None
    if writes.shares is not None:
        transitions, entered = left @ writes.shares, entered + query_pairs @ writes.shares
    retention = (
        additions.new_ones(()).expand(*additions.shape[:3], 1, 1) if factors.retention is None else factors.retention
    )
    memories, last = _ComposeChunks.apply(additions, retention, transitions, memory)  # type: ignore[no-untyped-call]
    return query_pairs @ writes.values + entered @ memories, last


class _ComposeChunks(torch.autograd.Function):
    """The memories before each chunk and the last one: S_(n+1) = kept_n S_n + transitions_n S_n + additions_n."""

    @staticmethod
    def forward(
        ctx: Any, additions: Tensor, retention: Tensor, transitions: Tensor | None, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        memories = torch.empty_like(additions)
        for i in range(additions.shape[2]):
            memories[:, :, i] = memory
            updated = torch.addcmul(additions[:, :, i], memory, retention[:, :, i])
            memory = updated if transitions is None else updated + transitions[:, :, i] @ memory
        ctx.save_for_backward(retention, transitions, memories)
        return memories, memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmemories: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        retention, transitions, memories = ctx.saved_tensors
        dadditions = torch.empty_like(memories)
        for i in reversed(range(memories.shape[2])):
            dadditions[:, :, i] = dlast
            updated = torch.addcmul(dmemories[:, :, i], dlast, retention[:, :, i])
            dlast = updated if transitions is None else updated + transitions[:, :, i].mT @ dlast
        dretention = dtransitions = None
        if ctx.needs_input_grad[1]:
            dretention = (dadditions * memories).sum(-1, keepdim=True)
            dretention = dretention if retention.shape[-2] > 1 else dretention.sum(-2, keepdim=True)
        if transitions is not None and ctx.needs_input_grad[2]:
            dtransitions = dadditions @ memories.mT
        return dadditions, dretention, dtransitions, dlast
