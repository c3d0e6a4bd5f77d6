"""Softmax attention with a bias that depends on the distance alone and needs no gradient.

With the keys in reverse order, entry (i, j) of the bias is element i + j of one short vector, so that the bias matrix
passed to torch's kernel is a view of that vector with both strides 1: nothing of quadratic size is allocated.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.nn.ops import attention_with_lse
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient

BLOCK = 256
"""Queries per block; larger ones waste more on hidden keys ahead, smaller ones slow torch's kernel down."""

NEGLIGIBLE = {torch.float32: 30.0, torch.float64: 50.0}
"""A weight below e to minus this times another one of its row changes no digit, nor do a hundred thousand of them."""


class QueryOffset(NamedTuple):
    """Query i is at the position of key `offset` + i, which it always sees; `causal` hides all later keys."""

    offset: int
    causal: bool


def toeplitz_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    bias: Float[Tensor, "h r"],
    back: int,
    query_offset: QueryOffset,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax of scale q_i k_j + bias[back + j - i] over keys j, applied to v_j; `bias` is constant beyond its ends."""
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    index_bias = _bias_by_index_sum(bias.to(compute_dtype), back, query_offset, q.shape[2], k.shape[2])
    index_bias = _mask_negligible(index_bias, q, k, query_offset, scale)
    # torch's kernel gives a thread a (row, head): with few rows several heads must share a call
    teams = _teams(index_bias, -(-torch.get_num_threads() // q.shape[0]))
    y: Tensor = _ToeplitzAttention.call(q, k, v, index_bias.contiguous(), teams, scale)
    return y


class TeamOfHeads(NamedTuple):
    """Consecutive heads of one call, and the first and last index at which one of them has a bias above -inf."""

    heads: slice
    first: int
    last: int


class ToeplitzBlock(NamedTuple):
    """Index of some heads and queries, of their visible keys (in reverse order), and their view of the biases."""

    rows: tuple[slice, slice, slice]
    keys: tuple[slice, slice, slice]
    bias: Float[Tensor, "1 h l s"]


class _ToeplitzAttention(HandwrittenGradient):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, index_bias: Tensor, teams: list[TeamOfHeads], scale: float
    ) -> Tensor:
        # keys in reverse order, so that the bias of (i, j) depends on i + j and is a view of a vector
        k = k.flip(2)
        v = v.flip(2)
        y = q.new_empty(*q.shape[:3], v.shape[3])
        lse = index_bias.new_empty(q.shape[:3])
        for rows, key_index, bias in _blocks(q, k, index_bias, teams):
            y[rows], lse[rows] = attention_with_lse.attention_forward(
                q[rows], k[key_index], v[key_index], scale=scale, bias=bias
            )
        ctx.save_for_backward(q, k, v, index_bias, y, lse)
        ctx.teams = teams
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        q, k, v, index_bias, y, lse = ctx.saved_tensors
        # a power of two is exact: multiplied back at the end, it changes no digit
        grad_y, size = _normalize_gradient(grad_y)
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros_like(k)
        grad_v = torch.zeros_like(v)
        for rows, key_index, bias in _blocks(q, k, index_bias, ctx.teams):
            grad_ys, qs, ys, lses = (x[rows] for x in (grad_y, q, y, lse))
            grads = attention_with_lse.attention_backward(
                grad_ys, qs, k[key_index], v[key_index], ys, lses, scale=ctx.scale, bias=bias
            )
            grad_q[rows] = grads[0]
            grad_k[key_index] += grads[1]
            grad_v[key_index] += grads[2]
        return grad_q * size, grad_k.flip(2) * size, grad_v.flip(2) * size, None, None, None


def _normalize_gradient(grad_y: Tensor) -> tuple[Tensor, Tensor]:
    """`grad_y` scaled to about 1, and its divisor, a power of two: products with small weights stay above 1e-38."""
    _, exponent = torch.frexp(grad_y.abs().amax().float())
    size = torch.exp2(exponent.to(grad_y.dtype))
    return grad_y / size, size


def _teams(index_bias: Float[Tensor, "h n"], size: int) -> list[TeamOfHeads]:
    """Teams of `size` heads: enough to occupy all threads, and few enough to skip keys that none of them sees."""
    if index_bias.is_meta:
        # meta tensors have no values: all keys count as visible
        return [TeamOfHeads(slice(0, len(index_bias)), 0, index_bias.shape[1] - 1)]
    is_visible = index_bias > -torch.inf
    first = is_visible.byte().argmax(1).tolist()
    last = (is_visible.shape[1] - 1 - is_visible.flip(1).byte().argmax(1)).tolist()
    parts = [slice(begin, min(begin + size, len(first))) for begin in range(0, len(first), size)]
    return [TeamOfHeads(part, min(first[part]), max(last[part])) for part in parts]


def _blocks(q: Tensor, k: Tensor, index_bias: Tensor, teams: list[TeamOfHeads]) -> Iterator[ToeplitzBlock]:
    """Yield blocks that cover every query of every head once."""
    length = q.shape[2]
    keys = k.shape[2]
    all_rows = slice(None)
    for heads, first, last in teams:
        for begin in range(0, length, BLOCK):
            end = min(begin + BLOCK, length)
            # query index plus key index stays within [first, last]: other keys have a bias of -inf for all queries of
            # the block
            low = max(0, first - end + 1)
            high = min(keys, last - begin + 1)
            team_bias = index_bias[heads]
            shape = (1, team_bias.shape[0], end - begin, high - low)
            offset = team_bias.storage_offset() + begin + low
            bias = team_bias.as_strided(shape, (0, index_bias.stride(0), 1, 1), offset)
            yield ToeplitzBlock((all_rows, heads, slice(begin, end)), (all_rows, heads, slice(low, high)), bias)


def _bias_by_index_sum(
    bias: Tensor, back: int, query_offset: QueryOffset, length: int, keys: int
) -> Float[Tensor, "h n"]:
    """The bias by query index plus key index, keys counted from the end; -inf for hidden keys."""
    ahead = keys - 1 - query_offset.offset - torch.arange(length + keys - 1, device=bias.device)
    index_bias = bias[:, (ahead + back).clamp(0, bias.shape[1] - 1)]
    if query_offset.causal:
        return index_bias.masked_fill(ahead > 0, -torch.inf)
    return index_bias


def _mask_negligible(
    index_bias: Tensor, q: Tensor, k: Tensor, query_offset: QueryOffset, scale: float
) -> Float[Tensor, "h n"]:
    """Set biases to -inf where every weight is a negligible share of the weight at the query's own position.

    Such weights have no effect, but in float32 many of them are denormal numbers below 1e-38, which make a CPU many
    times slower: steep slopes would make attention take four times as long.
    """
    max_length = [torch.linalg.vector_norm(x.detach(), dim=-1).amax((0, 2)).to(index_bias.dtype) for x in (q, k)]
    # |scale q k| is at most the product of the lengths, and may raise one score while it lowers the other
    margin = NEGLIGIBLE[index_bias.dtype] + 2 * abs(scale) * max_length[0] * max_length[1]
    own_bias = index_bias[:, k.shape[2] - 1 - query_offset.offset, None]
    return index_bias.masked_fill(index_bias < own_bias - margin[:, None], -torch.inf)
