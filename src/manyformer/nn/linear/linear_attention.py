"""Linear attention: each output is a sum over keys of (query feature . key feature) value, in equivalent forms.

With a the features of queries, c those of keys, and a memory M that is an r x f matrix,

    M_i = decay_i M_(i-1) + c_i v_i^T,    y_i = M_i^T a_i        (Katharopoulos et al. 2020, section 3.3)

The normalizer is one more column of v. Decays are logarithms, at most 0: one for all feature channels of a token, or
one for each. `run` numbers the documents of a row from 0 on; only run 0 continues from the `memory` argument, every
later one starts from zeros.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.nn.linear import matrix_recurrence
from manyformer.nn.linear.chunk_decays import decay_table, gradient_of_decays, gradient_of_sums, sum_decays
from manyformer.nn.linear.matrix_recurrence import RecurrenceResult, chunk_of, zero_memory
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient, needs_plain_operations
from manyformer.nn.runtime.one_operation import OneOperation


def quadratic(
    a: Float[Tensor, "b h l r"],
    c: Float[Tensor, "b h l r"],
    v: Float[Tensor, "b h l f"],
    decay: Float[Tensor, "b h l #r"] | None = None,
    run: Int[Tensor, "b l"] | None = None,
) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h r f"], Float[Tensor, "b h l l"]]:
    """The definition over all pairs: outputs, the memory after the last token, and the weights of the pairs."""
    visible = torch.ones(a.shape[2], a.shape[2], dtype=torch.bool, device=a.device).tril()
    if run is not None:
        visible = visible & (run[:, None, :, None] == run[:, None, None, :])
    pairs = (a @ c.mT).masked_fill(~visible, 0.0)
    if decay is None:
        last_visible = visible[..., -1, :, None].to(v.dtype)
        return pairs @ v, c.mT @ (v * last_visible), pairs
    factors = _segment_factors(decay)
    # what is left of each token after the last one: of the last token's document alone, as only that one can go on
    left = factors[..., -1, :, :] * visible[..., -1, :, None]
    if decay.shape[-1] > 1:
        pairs = torch.einsum("...id,...ijd,...jd->...ij", a, factors, c).masked_fill(~visible, 0.0)
    else:
        pairs = pairs * factors[..., 0]
    return pairs @ v, (c * left).mT @ v, pairs


def _segment_factors(decay: Float[Tensor, "b h l r"]) -> Float[Tensor, "b h l l r"]:
    """The product of the decays after token j up to token i, for all pairs (i, j); 1 where j is not before i."""
    after = torch.ones(decay.shape[2], decay.shape[2], dtype=torch.bool, device=decay.device).tril(-1)
    # summed for each pair anew, never as a difference of two sums: this is the definition that other forms are tested
    # by
    segments = decay[..., :, None, :].where(after[..., None], 0.0)
    return segments.cumsum(2).exp()


def chunked(
    a: Float[Tensor, "b h l r"],
    c: Float[Tensor, "b h l r"],
    v: Float[Tensor, "b h l f"],
    decay: Float[Tensor, "b h l #r"] | None = None,
    run: Int[Tensor, "b l"] | None = None,
    memory: Float[Tensor, "b h r f"] | None = None,
    *,
    chunk: int = 64,
) -> RecurrenceResult:
    """Chunks of tokens in parallel: pairs within a chunk, and a memory of all earlier chunks.

    With one decay for all channels the gradient is handwritten: it saves the inputs, the pairs and the memories, each
    about as large as an input.
    """
    if needs_plain_operations() or (decay is not None and decay.shape[-1] > 1):
        return matrix_recurrence.chunked(a, c, v, decay, run, memory, chunk=chunk)
    length = a.shape[2]
    chunk = chunk_of(length, chunk)
    if padding := -length % chunk:
        # zeros decay by exp(0) and add nothing: they leave the memory as it is
        a, c, v = (torch.nn.functional.pad(x, (0, 0, 0, padding)) for x in (a, c, v))
        if decay is not None:
            decay = torch.nn.functional.pad(decay, (0, 0, 0, padding))
        if run is not None:
            run = torch.cat([run, run[:, -1:].expand(-1, padding)], dim=1)
    memory = zero_memory(c, v) if memory is None else memory
    scalar_decay = None if decay is None else decay[..., 0]
    y, memory = _ChunkedLinearAttention.call(a, c, v, scalar_decay, run, memory, chunk)
    return RecurrenceResult(y[:, :, :length] if padding else y, memory)


def divide_by_normalizer(y: Float[Tensor, "b h l fp1"], floor: float) -> Float[Tensor, "b h l f"]:
    """Divide all columns but the last by the last one, the sum of the weights.

    A sum closer to 0 than `floor` is replaced by `floor` with its sign: random features may have sums of any sign, and
    a token that sees no key has the sum 0 and gets zeros.
    """
    result: Tensor = _DivideByNormalizer.call(y, floor)
    return result


class _DivideByNormalizer(HandwrittenGradient):
    """Division that saves only result and divisor; the heads of a token are adjacent in the result's memory."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, floor: float) -> Tensor:
        divisor = y[..., -1:]
        is_small = divisor.abs() < floor
        divisor = torch.where(is_small, torch.full_like(divisor, floor).copysign(divisor), divisor)
        # the output projection reads all heads of a token one after another
        result = torch.empty_like(y[..., :-1].transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        _divide_into(result, y[..., :-1], divisor)
        ctx.save_for_backward(result, divisor, is_small)
        return result

    @staticmethod
    def backward(ctx: Any, grad_result: Tensor) -> tuple[Tensor, None]:
        result, divisor, is_small = ctx.saved_tensors
        # with y = n / s: dn = dy / s and ds = -(dy . y) / s, both written to the columns of one tensor
        grad_y = grad_result.new_empty(*grad_result.shape[:-1], grad_result.shape[-1] + 1)
        _divide_into(grad_y[..., :-1], grad_result, divisor)
        grad_sum = (grad_result * result).sum(-1, keepdim=True).neg_().masked_fill_(is_small, 0.0)
        _divide_into(grad_y[..., -1:], grad_sum, divisor)
        return grad_y, None

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        y, floor = arguments
        divisor = y[..., -1:]
        return y[..., :-1] / torch.where(
            divisor.abs() < floor, torch.full_like(divisor, floor).copysign(divisor), divisor
        )


def _divide_into(result: Tensor, x: Tensor, divisor: Tensor) -> None:
    if torch.compiler.is_compiling():
        # the compiler of torch 2.11 breaks its graph at results that are parts of other tensors
        result.copy_(x / divisor)
    else:
        torch.div(x, divisor, out=result)


class _ChunkGates(NamedTuple):
    """Decay factors within a chunk, from the memory to a token, from a token to the memory, and of the memory.

    None stands for no decay.
    """

    inside: Float[Tensor, "b #h n c c"] | None
    enter: Float[Tensor, "b #h n c 1"] | None
    leave: Float[Tensor, "b #h n c 1"] | None
    keep: Float[Tensor, "b #h n 1 1"] | None


def _chunk_gates(decay: Tensor | None, run: Tensor | None, chunk: int, like: Tensor) -> _ChunkGates:
    if decay is None and run is None:
        return _ChunkGates(None, None, None, None)
    parts: list[Tensor] = []
    if decay is not None:
        sums, leaving = sum_decays(decay.reshape(*decay.shape[:-1], -1, chunk, 1))
        entering = sums.total().exp()
        parts = [decay_table(*sums), entering, leaving, entering[..., -1:, :]]
    if run is not None:
        run = run.reshape(run.shape[0], 1, -1, chunk)
        # the memory at the start of a chunk belongs to the last run of the previous chunk
        previous = torch.nn.functional.pad(run[:, :, :-1, -1:], (0, 0, 1, 0))
        last = run[..., -1:]
        pairs = (run[..., :, None] == run[..., None, :]).tril()
        same = [pairs, (run == previous)[..., None], (run == last)[..., None], (last == previous)[..., None]]
        if parts:
            parts = [p * s for p, s in zip(parts, same)]
        else:
            parts = [s.to(like.dtype) for s in same]
    return _ChunkGates(*parts)


class _ChunkedLinearAttention(OneOperation):
    """Outputs and final memory; lengths are multiples of the chunk."""

    @classmethod
    def loops(cls, *arguments: Any) -> int:
        a, *_, chunk = arguments
        chunks: int = a.shape[2] // chunk
        return chunks

    @classmethod
    def empty_results(cls, *arguments: Any) -> list[Tensor]:
        _, _, v, _, _, memory, _ = arguments
        return [v.new_empty(v.shape), memory.new_empty(memory.shape)]

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        a, c, v, decay, run, memory, chunk = inputs
        gates = _chunk_gates(decay, run, chunk, a)
        A, C, V = (x.unflatten(2, (-1, chunk)) for x in (a, c, v))
        # (b h n r f): what each chunk adds to the memory after it, turned in place into the memory before it
        chunk_sums = C.mT @ _apply_gate(V, gates.leave)
        memories, last = _sum_over_chunks(chunk_sums, memory, gates, range(chunk_sums.shape[2]))
        pairs = _apply_pair_gate(A @ C.mT, gates)
        y = _add_product(pairs, V, _apply_gate_in_place(A @ memories, gates.enter)).flatten(2, 3)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, c, v, decay, run, pairs, memories)
        ctx.chunk = chunk
        return y, last

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        a, c, v, decay, run, pairs, memories = ctx.saved_tensors
        dy, dlast = grads
        dy = torch.zeros_like(v) if dy is None else dy
        if dlast is None:
            dlast = torch.zeros_like(memories[:, :, 0])
        gates = _chunk_gates(decay, run, ctx.chunk, a)
        A, C, V, dY = (x.unflatten(2, (-1, ctx.chunk)) for x in (a, c, v, dy))
        # backward through the memories is the same sum over chunks in reverse order, with the gradients of those after
        # them
        entered = _apply_gate(dY, gates.enter)
        order = reversed(range(memories.shape[2]))
        grad_memories, dmemory = _sum_over_chunks(A.mT @ entered, dlast, gates, order)
        dpairs = dY @ V.mT
        # most decays are constants
        dsums = None
        if ctx.needs_input_grad[3]:
            dsums = gradient_of_sums(pairs * dpairs)
        dpairs = _apply_pair_gate(dpairs, gates)
        da = entered @ memories.mT
        del entered
        if dsums is not None:
            dsums += (A * da).sum(-1, keepdim=True)
        da = _add_product(dpairs, C, da).flatten(2, 3)
        dc = _apply_gate(V, gates.leave) @ grad_memories.mT
        # the gradient of a factor exp(s) with respect to s is the factor times its own gradient, which c . dc already
        # holds
        dleaving = None
        if dsums is not None:
            dleaving = (C * dc).sum(-1, keepdim=True)
        dc = _add_product(dpairs.mT, A, dc).flatten(2, 3)
        dv = _add_product(pairs.mT, dY, _apply_gate_in_place(C @ grad_memories, gates.leave)).flatten(2, 3)
        ddecay = None
        if dsums is not None and dleaving is not None and gates.keep is not None:
            # in place, as nothing reads these gradients any more, and new memory of this size takes as long as the sum
            dkeep = grad_memories.mul_(memories).sum((-2, -1), keepdim=True)
            ddecay = (gradient_of_decays(dsums, dleaving) + dkeep * gates.keep).flatten(2)
        return da, dc, dv, ddecay, None, dmemory, None


def _apply_pair_gate(pairs: Tensor, gates: _ChunkGates) -> Tensor:
    """Products of all pairs within a chunk, times their decay and causal mask, in place."""
    if gates.inside is None:
        return pairs.tril_()
    return pairs.mul_(gates.inside)


def _add_product(pairs: Tensor, x: Tensor, added: Tensor) -> Tensor:
    """pairs @ x + added, written to `added`."""
    flat = added.view(-1, *added.shape[-2:])
    flat.baddbmm_(pairs.reshape(-1, *pairs.shape[-2:]), x.reshape(-1, *x.shape[-2:]))
    return added


def _apply_gate(x: Tensor, gate: Tensor | None) -> Tensor:
    if gate is None:
        return x
    return x * gate


def _apply_gate_in_place(x: Tensor, gate: Tensor | None) -> Tensor:
    """`_apply_gate` for what is not needed without the gate."""
    if gate is None:
        return x
    return x.mul_(gate)


def _sum_over_chunks(sums: Tensor, memory: Tensor, gates: _ChunkGates, order: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Replace each chunk's sum by the decayed total of `memory` and the sums before it in `order`; also the last total.

    They are the memories before each chunk or, in reverse order, the gradients of the memories after each chunk.
    """
    # a loop over chunks: on a CPU half the time of torch's cumsum, which also has no decay
    for i in order:
        chunk_sum = sums[:, :, i]
        if gates.keep is None:
            total = chunk_sum + memory
        else:
            total = torch.addcmul(chunk_sum, memory, gates.keep[:, :, i])
        chunk_sum.copy_(memory)
        memory = total
    return sums, memory
