"""Softmax attention of tokens that several processes share: keys travel in a ring, outputs are merged by log-sum-exps.

Each process holds the queries, keys and values of its columns. Keys and values with their positions visit every
process (Liu et al. 2023, arXiv:2310.01889, section 3); in the backward pass their gradients travel with them. A process
holds two blocks of keys at a time, whatever the length of the rows.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyformer.nn.core import TokenPositions
from manyformer.nn.kernels.kernel import TokenRing
from manyformer.nn.masks.mask import Mask
from manyformer.nn.ops.attention_with_lse import attention_backward, attention_forward, merge_lse
from manyformer.nn.runtime.torch_internals import autocast_disabled, compiler_disabled


@compiler_disabled
def ring_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g l e"],
    v: Float[Tensor, "b g l f"],
    positions: TokenPositions,
    mask: Mask,
    ring: TokenRing,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Attention of this process's tokens to those of all processes, in float32 at least; without a key zeros.

    Every process calls it with as many tokens, and takes its gradient if one does.
    """
    compute_dtype = torch.promote_types(v.dtype, torch.float32)
    inputs = [x.to(compute_dtype).contiguous() for x in (q, k, v)]
    tokens = [positions.position_ids.contiguous(), positions.segment_ids.contiguous()]
    with autocast_disabled(q.device):
        y: Tensor = _RingAttention.apply(*inputs, *tokens, mask, ring, scale)  # type: ignore[no-untyped-call]
    return y.to(v.dtype)


class _VisiblePairs(NamedTuple):
    """The pairs of a block: a bias of 0 or -inf (None: all are visible), and the queries that see no key of it."""

    bias: Float[Tensor, "#b #h l s"] | None
    blind: Bool[Tensor, "#b #h l"] | None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, position_ids, segment_ids, mask, ring, scale = inputs
        y: Tensor = q.new_zeros(*q.shape[:3], v.shape[-1])
        lse = q.new_full(q.shape[:3], -torch.inf)
        queries = TokenPositions(position_ids, segment_ids)
        block = [k, v, position_ids, segment_ids]
        for step in range(ring.size):
            visible = _visible_pairs(mask, queries, TokenPositions(*block[2:]), q)
            if visible is not None:
                merge_lse(y, lse, *_attend(q, *_repeat_heads(block[:2], q), visible, scale))
            if step + 1 < ring.size:
                block = ring.pass_on(block)
        ctx.save_for_backward(q, k, v, position_ids, segment_ids, y, lse)
        ctx.mask = mask
        ctx.ring = ring
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_ids, segment_ids, y, lse = ctx.saved_tensors
        # queries without keys get zero weights in every block
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        grad_y = grad_y.contiguous()
        queries = TokenPositions(position_ids, segment_ids)
        grad_q = torch.zeros_like(q)
        block = [k, v, position_ids, segment_ids, torch.zeros_like(k), torch.zeros_like(v)]
        for _ in range(ctx.ring.size):
            visible = _visible_pairs(ctx.mask, queries, TokenPositions(*block[2:4]), q)
            if visible is not None:
                keys_values = _repeat_heads(block[:2], q)
                grads = attention_backward(grad_y, q, *keys_values, y, lse, scale=ctx.scale, bias=visible.bias)
                grad_q += grads[0]
                for total, grad in zip(block[4:], grads[1:], strict=True):
                    total += grad.view(*total.shape[:2], -1, *total.shape[2:]).sum(2)
            # after the last step, keys and their gradients are at home again
            block = ctx.ring.pass_on(block)
        return grad_q, block[4], block[5], None, None, None, None, None


def _visible_pairs(mask: Mask, queries: TokenPositions, keys: TokenPositions, q: Tensor) -> _VisiblePairs | None:
    """What queries see of a block of keys; None for nothing."""
    visible = mask.dense(queries, keys, q.shape[1])
    if not visible.any():
        return None
    if visible.all():
        return _VisiblePairs(None, None)
    bias = torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
    return _VisiblePairs(bias, ~visible.any(-1))


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: _VisiblePairs, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps over one block of keys."""
    if visible.bias is None or visible.blind is None:
        return attention_forward(q, k, v, scale=scale)
    # a query must see a key; what it computes without one is replaced
    bias = visible.bias.masked_fill(visible.blind[..., None], 0.0)
    y, lse = attention_forward(q, k, v, scale=scale, bias=bias)
    return y.masked_fill(visible.blind[..., None], 0.0), lse.masked_fill(visible.blind, -torch.inf)


def _repeat_heads(keys_values: list[Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values for each head of the queries."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in keys_values)
    return k, v
