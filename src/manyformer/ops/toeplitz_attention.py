"""Softmax attention with a bias that depends on the distance alone and needs no gradient.

With the keys in reverse order, entry (i, j) of the bias is number i + j of one short vector, so that what torch's
kernel takes for a matrix of biases is a view of that vector with both strides 1: nothing of quadratic size exists.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.ops import attention_with_lse

BLOCK = 256
"""Queries in a block. Larger blocks waste more on keys that lie ahead, smaller ones make torch's kernel slower."""

NEGLIGIBLE = {torch.float32: 30.0, torch.float64: 50.0}
"""A weight below e to minus this of another one of its row changes no digit, nor do a hundred thousand of them."""


class QueryOffset(NamedTuple):
    """Query i is at the place of key `offset` + i, which every query sees; `causal` hides all keys after it."""

    offset: int
    causal: bool


def attend(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    bias: Float[Tensor, "h r"],
    back: int,
    span: QueryOffset,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax of scale q_i k_j + bias[back + j - i] over keys j, applied to v_j; the ends of `bias` go on for ever."""
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = _sums(bias.to(wide), back, span, q.shape[2], k.shape[2])
    sums = _without_the_negligible(sums, q, k, span, scale)
    teams = _teams(sums, -(-torch.get_num_threads() // q.shape[0]))
    y: Tensor = _Toeplitz.apply(q, k, v, sums.contiguous(), teams, scale)  # type: ignore[no-untyped-call]
    return y


class TeamOfHeads(NamedTuple):
    """Neighbouring heads in one call, and the first and the last sum at which one of them has a bias above -inf."""

    heads: slice
    first: int
    last: int


class ToeplitzBlock(NamedTuple):
    """Some heads and queries, the keys (in reverse order) that they see, and their view of the biases."""

    rows: tuple[slice, slice, slice]
    seen: tuple[slice, slice, slice]
    bias: Float[Tensor, "1 h l s"]


class _Toeplitz(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, teams: list[TeamOfHeads], scale: float
    ) -> Tensor:
        k, v = k.flip(2), v.flip(2)
        y, lse = q.new_empty(*q.shape[:3], v.shape[3]), sums.new_empty(q.shape[:3])
        for rows, seen, bias in _blocks(q, k, sums, teams):
            y[rows], lse[rows] = attention_with_lse.attention_forward(q[rows], k[seen], v[seen], scale=scale, bias=bias)
        ctx.save_for_backward(q, k, v, sums, y, lse)
        ctx.teams, ctx.scale = teams, scale
        return y

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> Any:
        q, k, v, sums, y, lse = ctx.saved_tensors
        up, size = _normal(up)
        to_q, to_k, to_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, seen, bias in _blocks(q, k, sums, ctx.teams):
            ups, qs, ys, lses = (x[rows] for x in (up, q, y, lse))
            found = attention_with_lse.attention_backward(
                ups, qs, k[seen], v[seen], ys, lses, scale=ctx.scale, bias=bias
            )
            to_q[rows] = found[0]
            to_k[seen] += found[1]
            to_v[seen] += found[2]
        return to_q * size, to_k.flip(2) * size, to_v.flip(2) * size, None, None, None


def _normal(up: Tensor) -> tuple[Tensor, Tensor]:
    """`up` near the size of 1, and the power of two it was divided by: small weights times it stay above 1e-38."""
    _, exponent = torch.frexp(up.abs().amax().float())
    size = torch.exp2(exponent.to(up.dtype))
    return up / size, size


def _teams(sums: Float[Tensor, "h n"], size: int) -> list[TeamOfHeads]:
    """All heads, `size` of them in a team: that many keep all threads at work, fewer see no more than they need."""
    if sums.is_meta:
        # without numbers, all that could be seen
        return [TeamOfHeads(slice(0, len(sums)), 0, sums.shape[1] - 1)]
    seen = sums > -torch.inf
    first = seen.byte().argmax(1).tolist()
    last = (seen.shape[1] - 1 - seen.flip(1).byte().argmax(1)).tolist()
    parts = [slice(begin, min(begin + size, len(first))) for begin in range(0, len(first), size)]
    return [TeamOfHeads(part, min(first[part]), max(last[part])) for part in parts]


def _blocks(q: Tensor, k: Tensor, sums: Tensor, teams: list[TeamOfHeads]) -> Iterator[ToeplitzBlock]:
    """Every query of every head, once."""
    length, keys = q.shape[2], k.shape[2]
    each = slice(None)
    for heads, first, last in teams:
        for begin in range(0, length, BLOCK):
            end = min(begin + BLOCK, length)
            low, high = max(0, first - end + 1), min(keys, last - begin + 1)
            of_heads = sums[heads]
            shape = (1, of_heads.shape[0], end - begin, high - low)
            bias = of_heads.as_strided(shape, (0, sums.stride(0), 1, 1), of_heads.storage_offset() + begin + low)
            yield ToeplitzBlock((each, heads, slice(begin, end)), (each, heads, slice(low, high)), bias)


def _sums(bias: Tensor, back: int, span: QueryOffset, length: int, keys: int) -> Float[Tensor, "h n"]:
    """The bias by the sum of a query's number and a key's, keys counted from the end; -inf for hidden keys."""
    ahead = keys - 1 - span.offset - torch.arange(length + keys - 1, device=bias.device)
    sums = bias[:, (ahead + back).clamp(0, bias.shape[1] - 1)]
    return sums.masked_fill(ahead > 0, -torch.inf) if span.causal else sums


def _without_the_negligible(
    sums: Tensor, q: Tensor, k: Tensor, span: QueryOffset, scale: float
) -> Float[Tensor, "h n"]:
    """-inf where no scores could lift a weight above the negligible share of what the query's own place gets.

    Such weights count for nothing, but in float32 many of them are numbers below 1e-38, with which a CPU calculates
    many times more slowly: steep slopes would make attention take four times as long.
    """
    max_length = [torch.linalg.vector_norm(x.detach(), dim=-1).amax((0, 2)).to(sums.dtype) for x in (q, k)]
    apart = NEGLIGIBLE[sums.dtype] + 2 * abs(scale) * max_length[0] * max_length[1]
    own = sums[:, k.shape[2] - 1 - span.offset, None]
    return sums.masked_fill(sums < own - apart[:, None], -torch.inf)
