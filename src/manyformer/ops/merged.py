"""Attention to several disjoint sets of keys in one softmax, each set a fused call: nothing is laid side by side.

Outputs are merged by their log-sum-exps, and the gradient of each set is taken with the merged output (see `flash`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.ops import flash


class Part(NamedTuple):
    """Keys and values; `bias` is added to the scores and takes no gradient, `blind` queries see none of the keys."""

    k: Float[Tensor, "n h s e"]
    v: Float[Tensor, "n h s f"]
    bias: Float[Tensor, "#n #h #l s"] | None = None
    causal: bool = False
    blind: Bool[Tensor, "#n #h #l"] | None = None


def attend(q: Float[Tensor, "n h l e"], parts: Sequence[Part], *, scale: float) -> Float[Tensor, "n h l f"]:
    """Softmax over the keys of all parts together; every query must see one."""
    if flash.serves(q, parts[0].v):
        found: Tensor = _merged(q, parts, scale)
        return found
    k, v = torch.cat([part.k for part in parts], dim=2), torch.cat([part.v for part in parts], dim=2)
    bias = torch.cat([_written(part, q) for part in parts], dim=-1)
    y: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return y


def naive(q: Float[Tensor, "n h l e"], parts: Sequence[Part], *, scale: float) -> Float[Tensor, "n h l f"]:
    """The definition."""
    scores = torch.cat([q @ part.k.mT * scale + _written(part, q) for part in parts], dim=-1)
    return scores.softmax(-1) @ torch.cat([part.v for part in parts], dim=2)


def _written(part: Part, q: Tensor) -> Float[Tensor, "n h l s"]:
    """What is added to the scores of a part, causality and blindness among it."""
    shape = (*q.shape[:3], part.k.shape[2])
    bias = q.new_zeros(shape[2:]) if part.bias is None else part.bias.to(q.dtype)
    if part.causal:
        later = torch.ones(shape[2:], dtype=torch.bool, device=q.device).triu(1)
        bias = bias.masked_fill(later, -torch.inf)
    bias = bias.expand(shape)
    return bias if part.blind is None else bias.masked_fill(part.blind[..., None], -torch.inf)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _merged(q: Tensor, parts: Sequence[Part], scale: float) -> Tensor:
    tensors = [tensor for part in parts for tensor in part[:2]]
    rest = [(part.bias, part.causal, part.blind) for part in parts]
    y: Tensor = _Merged.apply(q, rest, scale, *tensors)  # type: ignore[no-untyped-call]
    return y


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, rest: Any, scale: float, *tensors: Tensor) -> Tensor:
        found = []
        for part in _parts(q, rest, tensors):
            y, lse = flash.forward(q, part.k, part.v, scale=scale, bias=part.bias, causal=part.causal)
            if part.blind is not None:
                y, lse = y.masked_fill(part.blind[..., None], 0.0), lse.masked_fill(part.blind, -torch.inf)
            found.append((y, lse))
        (y, lse), *others = found
        for more in others:
            flash.merge(y, lse, *more)
        ctx.save_for_backward(q, y, lse, *tensors)
        ctx.rest, ctx.scale = rest, scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Any, ...]:
        q, y, lse, *tensors = ctx.saved_tensors
        to_q, others = torch.zeros_like(q), []
        for part in _parts(q, ctx.rest, tensors):
            # a blind query takes no part: without a gradient from above it gives none to these keys
            above = up if part.blind is None else up.masked_fill(part.blind[..., None], 0.0)
            dq, dk, dv = flash.backward(
                above, q, part.k, part.v, y, lse, scale=ctx.scale, bias=part.bias, causal=part.causal
            )
            to_q += dq
            others += [dk, dv]
        return to_q, None, None, *others


def _parts(q: Tensor, rest: Sequence[Any], tensors: Sequence[Tensor]) -> Iterator[Part]:
    """The parts again, with biases as wide as torch's kernel asks for."""
    for k, v, (bias, causal, blind) in zip(tensors[::2], tensors[1::2], rest):
        wide = None if bias is None else bias.detach().to(q.dtype).expand(*q.shape[:3], k.shape[2])
        yield Part(k, v, wide, causal, blind)
