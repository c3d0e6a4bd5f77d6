"""Linear attention: each output is a sum over keys of (query feature . key feature) value, in forms that agree.

With a the features of queries, c those of keys, and a memory M that is an r x f matrix,

    M_i = decay_i M_(i-1) + c_i v_i^T,    y_i = M_i^T a_i        (Katharopoulos et al. 2020, section 3.3)

The column that normalises is one more column of v. Decays are given as logarithms, at most 0. `run` numbers the
documents of a row from 0 on; only run 0 goes on from the `memory` that is handed in, every later one begins afresh.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


class LinearAttentionResult(NamedTuple):
    """Outputs, and the memory after the last token."""

    y: Float[Tensor, "b h l f"]
    memory: Float[Tensor, "b h r f"]


def quadratic(
    a: Float[Tensor, "b h l r"],
    c: Float[Tensor, "b h l r"],
    v: Float[Tensor, "b h l f"],
    decay: Float[Tensor, "b h l"] | None = None,
    run: Int[Tensor, "b l"] | None = None,
) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h r f"], Float[Tensor, "b h l l"]]:
    """The definition, with every pair written out: outputs, the memory after the last token, and the pairs' weights."""
    seen = torch.ones(a.shape[2], a.shape[2], dtype=torch.bool, device=a.device).tril()
    if run is not None:
        seen = seen & (run[:, None, :, None] == run[:, None, None, :])
    pairs = (a @ c.mT).masked_fill(~seen, 0.0)
    if decay is None:
        left = seen[..., -1, :, None].to(v.dtype)
        return pairs @ v, c.mT @ (v * left), pairs
    total = decay.cumsum(-1)
    # where nothing is seen the exponent may be large
    reach = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    pairs = pairs * reach
    return pairs @ v, c.mT @ (v * reach[..., -1, :, None]), pairs


def recurrent(
    a: Float[Tensor, "b h l r"],
    c: Float[Tensor, "b h l r"],
    v: Float[Tensor, "b h l f"],
    decay: Float[Tensor, "b h l"] | None = None,
    run: Int[Tensor, "b l"] | None = None,
    memory: Float[Tensor, "b h r f"] | None = None,
) -> LinearAttentionResult:
    """Token by token: what decoding does, and the definition of a memory."""
    memory = _empty(c, v) if memory is None else memory
    outputs, current = [], 0
    for i in range(a.shape[2]):
        if run is not None:
            same = run[:, i] == (run[:, i - 1] if i else current)
            memory = memory.where(same[:, None, None, None], 0.0)
        if decay is not None:
            memory = memory * decay[:, :, i, None, None].exp()
        memory = torch.addcmul(memory, c[:, :, i, :, None], v[:, :, i, None, :])
        outputs.append((a[:, :, i, None, :] @ memory)[:, :, 0])
    return LinearAttentionResult(torch.stack(outputs, dim=2), memory)


def chunked(
    a: Float[Tensor, "b h l r"],
    c: Float[Tensor, "b h l r"],
    v: Float[Tensor, "b h l f"],
    decay: Float[Tensor, "b h l"] | None = None,
    run: Int[Tensor, "b l"] | None = None,
    memory: Float[Tensor, "b h r f"] | None = None,
    *,
    chunk: int = 64,
) -> LinearAttentionResult:
    """Chunks of tokens in parallel: pairs within a chunk, and a memory of all that lies before it.

    Gradients are written by hand: they keep the inputs, the pairs and the memories, each about as large as an input.
    """
    length = a.shape[2]
    chunk = min(chunk, length)
    if extra := -length % chunk:
        a, c, v = (torch.nn.functional.pad(x, (0, 0, 0, extra)) for x in (a, c, v))
        decay = None if decay is None else torch.nn.functional.pad(decay, (0, extra))
        run = None if run is None else torch.cat([run, run[:, -1:].expand(-1, extra)], dim=1)
    memory = _empty(c, v) if memory is None else memory
    y, memory = _Chunked.apply(a, c, v, decay, run, memory, chunk)  # type: ignore[no-untyped-call]
    return LinearAttentionResult(y[:, :, :length] if extra else y, memory)


def divide_by_normalizer(y: Float[Tensor, "b h l fp1"], floor: float) -> Float[Tensor, "b h l f"]:
    """All columns but the last, divided by the last one, the sum of the weights.

    A sum nearer to 0 than `floor` counts as `floor` with its sign: random features may have sums of any sign, and a
    token that sees nothing has the sum 0 and gets zeros.
    """
    result: Tensor = _Ratio.apply(y, floor)  # type: ignore[no-untyped-call]
    return result


class _Ratio(torch.autograd.Function):
    """Keeps the result and the divisor alone; the heads of a token lie side by side in the result, as they go on."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, floor: float) -> Tensor:
        below = y[..., -1:]
        small = below.abs() < floor
        below = torch.where(small, torch.full_like(below, floor).copysign(below), below)
        result = torch.empty_like(y[..., :-1].transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        torch.div(y[..., :-1], below, out=result)
        ctx.save_for_backward(result, below, small)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, None]:
        result, below, small = ctx.saved_tensors
        down = up.new_empty(*up.shape[:-1], up.shape[-1] + 1)
        torch.div(up, below, out=down[..., :-1])
        torch.div((up * result).sum(-1, keepdim=True).neg_().masked_fill_(small, 0.0), below, out=down[..., -1:])
        return down, None


def _empty(c: Tensor, v: Tensor) -> Tensor:
    return v.new_zeros(*c.shape[:2], c.shape[-1], v.shape[-1])


class _Flow(NamedTuple):
    """How much of a token gets to another: inside its chunk, from the memory, into the memory, from memory to memory.

    None is all of it.
    """

    inside: Float[Tensor, "b #h n c c"] | None
    enter: Float[Tensor, "b #h n c 1"] | None
    leave: Float[Tensor, "b #h n c 1"] | None
    keep: Float[Tensor, "b #h n 1 1"] | None


def _flow(decay: Tensor | None, run: Tensor | None, chunk: int, like: Tensor) -> _Flow:
    if decay is None and run is None:
        return _Flow(None, None, None, None)
    parts: list[Tensor] = []
    if decay is not None:
        total = decay.reshape(*decay.shape[:-1], -1, chunk).cumsum(-1)
        # where nothing is seen the exponent may be large, and on a CPU exp(-inf) takes twenty times as long as exp(0)
        inside = (total[..., :, None] - total[..., None, :]).clamp_(max=0.0).exp_().tril_()
        last = total[..., -1:]
        parts = [inside, total.exp()[..., None], (last - total).exp()[..., None], last.exp()[..., None]]
    if run is not None:
        run = run.reshape(run.shape[0], 1, -1, chunk)
        # the memory at the beginning of a chunk is that of the last run before it
        before = torch.nn.functional.pad(run[:, :, :-1, -1:], (0, 0, 1, 0))
        last = run[..., -1:]
        same = [
            (run[..., :, None] == run[..., None, :]).tril(),
            (run == before)[..., None],
            (run == last)[..., None],
            (last == before)[..., None],
        ]
        parts = [p * s for p, s in zip(parts, same)] if parts else [s.to(like.dtype) for s in same]
    return _Flow(*parts)


class _Chunked(torch.autograd.Function):
    """Outputs and last memory; lengths are multiples of the chunk."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        a, c, v, decay, run, memory, chunk = inputs
        flow = _flow(decay, run, chunk, a)
        A, C, V = (x.unflatten(2, (-1, chunk)) for x in (a, c, v))
        memories, last = _memories(C, V, flow, memory)
        pairs = _pairs(A, C, flow)
        y = _product(pairs, V, _through(A @ memories, flow.enter)).flatten(2, 3)
        ctx.set_materialize_grads(False)
        # what a gradient of the decay needs; most decays are given, not learned
        ends = (y, last) if ctx.needs_input_grad[3] else (None, None)
        ctx.save_for_backward(a, c, v, decay, run, pairs, memories, *ends)
        ctx.chunk = chunk
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *up: Any) -> tuple[Tensor | None, ...]:
        a, c, v, decay, run, pairs, memories, y, last = ctx.saved_tensors
        dy, dlast = up
        dy = torch.zeros_like(v) if dy is None else dy
        dlast = torch.zeros_like(memories[:, :, 0]) if dlast is None else dlast
        flow = _flow(decay, run, ctx.chunk, a)
        A, C, V, dY = (x.unflatten(2, (-1, ctx.chunk)) for x in (a, c, v, dy))
        entered = _through(dY, flow.enter)
        later, dmemory = _gradients_of_memories(A.mT @ entered, flow, dlast)
        dpairs = _pairs(dY, V, flow)
        da = _product(dpairs, C, entered @ memories.mT).flatten(2, 3)
        dc = _product(dpairs.mT, A, _through(V, flow.leave) @ later.mT).flatten(2, 3)
        dv = _product(pairs.mT, dY, _through(C @ later, flow.leave)).flatten(2, 3)
        ddecay = None if y is None else _gradient_of_decay(y, dy, v, dv, last, dlast)
        return da, dc, dv, ddecay, None, dmemory, None


def _pairs(left: Tensor, right: Tensor, flow: _Flow) -> Tensor:
    """Products of all pairs within a chunk, as far as the one comes to the other."""
    pairs = left @ right.mT
    return pairs.tril_() if flow.inside is None else pairs.mul_(flow.inside)


def _product(pairs: Tensor, x: Tensor, added: Tensor) -> Tensor:
    """pairs @ x + added, in place of `added`."""
    flat = added.view(-1, *added.shape[-2:])
    flat.baddbmm_(pairs.reshape(-1, *pairs.shape[-2:]), x.reshape(-1, *x.shape[-2:]))
    return added


def _through(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else x * gate


def _memories(c: Tensor, v: Tensor, flow: _Flow, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The memory before each chunk, and the one after all of them."""
    sums = c.mT @ _through(v, flow.leave)
    # one chunk after the other: on a CPU half the time of torch's cumsum, which also knows no decay
    for number in range(sums.shape[2]):
        here = sums[:, :, number]
        after = _faded(here, memory, flow, number)
        here.copy_(memory)
        memory = after
    return sums, memory


def _gradients_of_memories(sums: Tensor, flow: _Flow, last: Tensor) -> tuple[Tensor, Tensor]:
    """From those of reading in each chunk: the gradient of the memory after each chunk, and of the first memory."""
    for number in reversed(range(sums.shape[2])):
        here = sums[:, :, number]
        before = _faded(here, last, flow, number)
        here.copy_(last)
        last = before
    return sums, last


def _faded(here: Tensor, other: Tensor, flow: _Flow, number: int) -> Tensor:
    """here + other, as much of it as gets through chunk `number`."""
    return here + other if flow.keep is None else torch.addcmul(here, other, flow.keep[:, :, number])


def _gradient_of_decay(y: Tensor, dy: Tensor, v: Tensor, dv: Tensor, last: Tensor, dlast: Tensor) -> Tensor:
    """With t the sum of log decays, y_i is proportional to exp(t_i) and what comes of token j to exp(-t_j)."""
    dtotal = (y * dy).sum(-1) - (v * dv).sum(-1)
    final = (last * dlast).sum((-2, -1))
    return dtotal.flip(-1).cumsum(-1).flip(-1) + final[..., None]
