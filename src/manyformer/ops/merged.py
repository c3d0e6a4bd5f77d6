"""Attention to several disjoint sets of keys in one softmax.

On a CPU scores are written out in memory that stays in its caches, some rows at a time, and the weights kept for the
gradient where they are few (see `tile_weights`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.ops.scratch import Scratch
from manyformer.ops.tile_weights import KEPT, Above, Call, gradients
from manyformer.precision import full_precision

PAIRS = 1 << 17
"""Pairs of tokens that each thread looks at in one call: as many as stay in its caches."""


class Part(NamedTuple):
    """Keys and values; `bias` is added to the scores and takes no gradient, `blind` queries see none of the keys."""

    k: Float[Tensor, "n h s e"]
    v: Float[Tensor, "n h s f"]
    bias: Float[Tensor, "#n #h #l s"] | None = None
    causal: bool = False
    blind: Bool[Tensor, "#n #h #l"] | None = None

    @property
    def hides(self) -> bool:
        """Whether anything is added to scores."""
        return self.causal or self.bias is not None or self.blind is not None


def attend(q: Float[Tensor, "n h l e"], parts: Sequence[Part], *, scale: float) -> Float[Tensor, "n h l f"]:
    """Softmax over the keys of all parts together; every query must see one."""
    if q.device.type == "cpu":
        kind, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
        tensors = [x.to(wide) for part in parts for x in part[:2]]
        biases = [_written(part, q.shape[2], wide) if part.hides else None for part in parts]
        found: Tensor = _merged(q.to(wide), biases, scale, tensors)
        return found.to(kind)
    k, v = torch.cat([part.k for part in parts], dim=2), torch.cat([part.v for part in parts], dim=2)
    shown = [_written(part, q.shape[2], q.dtype) for part in parts]
    bias = torch.cat([x.expand(*q.shape[:3], part.k.shape[2]) for x, part in zip(shown, parts)], dim=-1)
    y: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return y


def naive(q: Float[Tensor, "n h l e"], parts: Sequence[Part], *, scale: float) -> Float[Tensor, "n h l f"]:
    """The definition."""
    scores = [q @ part.k.mT * scale + _written(part, q.shape[2], q.dtype) for part in parts]
    return torch.cat(scores, dim=-1).softmax(-1) @ torch.cat([part.v for part in parts], dim=2)


def _written(part: Part, queries: int, dtype: torch.dtype) -> Float[Tensor, "#n #h #l #s"]:
    """What is added to the scores of a part, causality and blindness among it."""
    shape, device = (queries, part.k.shape[2]), part.k.device
    bias = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device) if part.bias is None else part.bias.detach().to(dtype)
    if part.causal:
        later = torch.ones(shape, dtype=torch.bool, device=device).triu(1)
        bias = bias + torch.zeros(shape, dtype=dtype, device=device).masked_fill(later, -torch.inf)
    if part.blind is not None:
        bias = bias + torch.zeros_like(part.blind, dtype=dtype).masked_fill(part.blind, -torch.inf)[..., None]
    return bias


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _merged(q: Tensor, biases: Sequence[Tensor | None], scale: float, tensors: Sequence[Tensor]) -> Tensor:
    y: Tensor = _Merged.apply(q, biases, scale, *tensors)  # type: ignore[no-untyped-call]
    return y


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, biases: Sequence[Tensor | None], scale: float, *tensors: Tensor) -> Tensor:
        work = _Work(q, tensors, biases, scale)
        y = q.new_empty(*q.shape[:3], tensors[1].shape[-1])
        keeps = any(ctx.needs_input_grad) and q.shape[:3].numel() * sum(work.sizes) <= KEPT
        kept: list[Tensor] = []
        with full_precision(q.device):
            for some in work.slices():
                call = work.call(some)
                found = work.weights(some, call, fresh=keeps)
                torch.bmm(found, call.v, out=y[some].flatten(0, 1))
                if keeps:
                    kept.append(found)
        ctx.save_for_backward(q, y, *tensors, *kept)
        ctx.biases, ctx.scale = biases, scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Any, ...]:
        q, y, *more = ctx.saved_tensors
        count = 2 * len(ctx.biases)
        tensors, kept = more[:count], more[count:][::-1]
        work, up = _Work(q, tensors, ctx.biases, ctx.scale), up.contiguous()
        slopes = (up * y).sum(-1, keepdim=True)
        grads = [x.new_empty(x.shape) for x in (q, *tensors)]
        with full_precision(q.device):
            for some in work.slices():
                call = work.call(some)
                found = kept.pop() if kept else work.weights(some, call, fresh=False)
                above = Above(*(x[some].flatten(0, 1) for x in (up, slopes)))
                to_q, to_k, to_v = gradients(call, found, above, work.scratch)
                news = [to_q] + [
                    x for pair in zip(*(torch.split(x, work.sizes, 1) for x in (to_k, to_v))) for x in pair
                ]
                for grad, new in zip(grads, news):
                    grad[some].flatten(0, 1).copy_(new)
        for grad in (grads[0], *grads[1::2]):
            grad *= ctx.scale
        return grads[0], None, None, *grads[1:]


class _Work:
    """Queries, the keys and values of all parts in turn, and what is added to their scores."""

    def __init__(self, q: Tensor, tensors: Sequence[Tensor], biases: Sequence[Tensor | None], scale: float) -> None:
        self.q, self.keys, self.values, self.biases, self.scale = q, tensors[::2], tensors[1::2], biases, scale
        self.sizes = [k.shape[2] for k in self.keys]
        self.scratch = Scratch(q)

    def slices(self) -> Iterator[slice]:
        """Some rows at a time."""
        most = PAIRS * torch.get_num_threads()
        step = max(most // (self.q.shape[1] * self.q.shape[2] * sum(self.sizes)), 1)
        return (slice(begin, min(begin + step, len(self.q))) for begin in range(0, len(self.q), step))

    def call(self, some: slice) -> Call:
        """Some rows, heads laid end to end and the keys of all parts beside each other; it holds until the next one."""
        k, v = (self._beside(name, parts, some) for name, parts in (("keys", self.keys), ("values", self.values)))
        return Call(self.q[some].flatten(0, 1), k, v, None, None)

    def _beside(self, name: str, parts: Sequence[Tensor], some: slice) -> Float[Tensor, "nh s e"]:
        rows = [x[some].flatten(0, 1) for x in parts]
        into = self.scratch(name, len(rows[0]), sum(self.sizes), rows[0].shape[-1])
        return torch.cat(rows, dim=1, out=into)

    def weights(self, some: slice, call: Call, *, fresh: bool) -> Float[Tensor, "nh l s"]:
        """Those of all keys, in memory of their own if it is `fresh`."""
        scores = self.scratch("scores", *call.shape)
        torch.baddbmm(scores, call.q, call.k.mT, beta=0, alpha=self.scale, out=scores)
        each = torch.split(scores.view(-1, *self.q.shape[1:3], call.shape[2]), self.sizes, -1)
        for here, bias in zip(each, self.biases):
            if bias is not None:
                here += bias if len(bias) == 1 else bias[some]
        into = self.q.new_empty(call.shape) if fresh else self.scratch("weights", *call.shape)
        return torch.softmax(scores, -1, out=into)
