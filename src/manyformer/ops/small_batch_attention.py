"""Softmax attention of many rows with few queries and few keys each, and a gradient of its own.

On a CPU scores are written out in memory that stays in its caches, some rows of a head at a time, and the weights kept
for the gradient where they are few (see `tile_weights`). Tokens are read and written where projections lay them.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.autocast import autocast_disabled
from manyformer.ops.scratch_buffer import ScratchBuffer
from manyformer.ops.tile_softmax import KEPT, OutputGradient, TileCall, gradients, recompute_weights, weights

PAIRS = 1 << 17
"""Pairs of tokens that each thread looks at in one call: as many as stay in its caches."""

BatchSlice = tuple[slice, int]
"""Some rows of one head."""


def attend(
    q: Float[Tensor, "r h c e"],
    k: Float[Tensor, "r h s e"],
    v: Float[Tensor, "r h s f"],
    *,
    scale: float,
    mask: Bool[Tensor, "c s"] | None = None,
    bias: Float[Tensor, "r #h s"] | None = None,
) -> Float[Tensor, "r h c f"]:
    """Every query must see a key: `mask` says which ones in every row; `bias` is added to a key's scores.

    The bias takes no gradient.
    """
    if q.device.type != "cpu":
        return fused(q, k, v, scale=scale, mask=mask, bias=bias)
    wide = torch.promote_types(q.dtype, torch.float32)
    added = None if mask is None else _hidden(mask, wide)
    y: Tensor = _attended(*(x.to(wide) for x in (q, k, v)), added, None if bias is None else bias.to(wide), scale)
    return y.to(q.dtype)


def fused(
    q: Float[Tensor, "r h c e"],
    k: Float[Tensor, "r h s e"],
    v: Float[Tensor, "r h s f"],
    *,
    scale: float,
    mask: Bool[Tensor, "c s"] | None = None,
    bias: Float[Tensor, "r #h s"] | None = None,
) -> Float[Tensor, "r h c f"]:
    """The same by torch's own kernels."""
    added = torch.zeros((), dtype=q.dtype, device=q.device) if mask is None else _hidden(mask, q.dtype)
    if bias is not None:
        added = added + bias.detach().to(q.dtype)[:, :, None]
    y: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=added if added.dim() else None, scale=scale)
    return y


def naive(
    q: Float[Tensor, "r h c e"],
    k: Float[Tensor, "r h s e"],
    v: Float[Tensor, "r h s f"],
    *,
    scale: float,
    mask: Bool[Tensor, "c s"],
    bias: Float[Tensor, "r #h s"],
) -> Float[Tensor, "r h c f"]:
    """The definition."""
    scores = (q @ k.mT * scale + bias[:, :, None]).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def _hidden(mask: Bool[Tensor, "c s"], dtype: torch.dtype) -> Float[Tensor, "c s"]:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    y: Tensor = _Attend.apply(q, k, v, mask, bias, scale)  # type: ignore[no-untyped-call]
    return y


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float
    ) -> Tensor:
        work = _Work(q, k, v, mask, bias)
        rows, heads, queries, _ = q.shape
        y = q.new_empty(rows, queries, heads, v.shape[-1]).transpose(1, 2)
        keeps = any(ctx.needs_input_grad) and q.shape[:3].numel() * k.shape[2] <= KEPT
        kept: list[Tensor] = []
        with autocast_disabled(q.device):
            for some, head in work.parts():
                call = work.call(some, head)
                found = q.new_empty(call.shape) if keeps else work.scratch("scores", *call.shape)
                weights(call, scale, work.scratch("scores", *call.shape), found)
                y[some, head] = torch.bmm(found, call.v, out=work.scratch("y", *call.shape[:2], v.shape[-1]))
                if keeps:
                    kept.append(found)
        ctx.save_for_backward(q, k, v, y, mask, bias, *kept)
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, mask, bias, *kept = ctx.saved_tensors
        work = _Work(q, k, v) if kept else _Work(q, k, v, mask, bias)
        slopes, kept = (up * y).sum(-1, keepdim=True), kept[::-1]
        to_q, to_k, to_v = (torch.empty_like(x) for x in (q, k, v))
        with autocast_disabled(q.device):
            for some, head in work.parts():
                call = work.call(some, head)
                found = kept.pop() if kept else recompute_weights(call, ctx.scale, work.scratch)
                above = OutputGradient(work.laid("up", up[some, head]), slopes[some, head])
                into = [work.scratch("to_q", *call.q.shape), to_k[some, head], to_v[some, head]]
                gradients(call, found, above, work.scratch, ctx.scale, into)
                to_q[some, head] = into[0]
        return to_q, to_k, to_v, None, None, None


class _Work:
    """Queries, keys and values, and what is added to their scores, which weights that were kept do not need."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> None:
        self.q, self.k, self.v, self.mask, self.bias = q, k, v, mask, bias
        self.scratch = ScratchBuffer(q)
        # most rows may have no bias
        self.biased = [False] * len(q) if bias is None else (bias != 0).flatten(1).any(1).tolist()

    def parts(self) -> Iterator[BatchSlice]:
        """Some rows at a time."""
        rows, heads, queries, _ = self.q.shape
        step = max(PAIRS * torch.get_num_threads() // (queries * self.k.shape[2]), 1)
        for head in range(heads):
            for begin in range(0, rows, step):
                yield slice(begin, min(begin + step, rows)), head

    def call(self, some: slice, head: int) -> TileCall:
        """Some rows of a head; it holds until the next one."""
        q = self.laid("q", self.q[some, head])
        added = None if self.mask is None else self.mask[None]
        if self.bias is not None and any(self.biased[some]):
            bias = self.bias[some, head if self.bias.shape[1] > 1 else 0, None]
            added = bias if added is None else added + bias
        return TileCall(q, self.k[some, head], self.v[some, head], added, None)

    def laid(self, name: str, x: Float[Tensor, "r c e"]) -> Float[Tensor, "r c e"]:
        """Tokens end to end: products of rows that are far apart take longer than copying them."""
        return x if x.is_contiguous() else self.scratch(name, *x.shape).copy_(x)
