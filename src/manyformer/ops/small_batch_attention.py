"""Softmax attention of many rows with few queries and few keys each, with its own gradient.

On a CPU scores are written to memory that stays in its caches, some rows of a head at a time, and weights are saved for
the gradient where they are few (see `tile_softmax`). Tokens are read and written in the layout of the projections.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.ops import tile_softmax
from manyformer.ops.scratch_buffer import ScratchBuffer
from manyformer.ops.tile_softmax import MAX_SAVED_WEIGHTS, OutputGradient, TileCall
from manyformer.torch_internals import autocast_disabled, compiler_disabled

PAIRS_PER_THREAD = 1 << 17
"""Token pairs per thread and call: as many as fit its caches."""


def small_batch_attention(
    q: Float[Tensor, "r h c e"],
    k: Float[Tensor, "r h s e"],
    v: Float[Tensor, "r h s f"],
    *,
    scale: float,
    mask: Bool[Tensor, "c s"] | None = None,
    bias: Float[Tensor, "r #h s"] | None = None,
) -> Float[Tensor, "r h c f"]:
    """Softmax attention; `mask` of visible keys is shared by all rows, `bias` is added to a key's scores.

    Every query must see a key. The bias takes no gradient.
    """
    if q.device.type != "cpu":
        return sdpa_attention(q, k, v, scale=scale, mask=mask, bias=bias)
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    mask_bias = None
    if mask is not None:
        mask_bias = _mask_to_bias(mask, compute_dtype)
    bias = None if bias is None else bias.to(compute_dtype)
    y = _apply_attention(q.to(compute_dtype), k.to(compute_dtype), v.to(compute_dtype), mask_bias, bias, scale)
    return y.to(q.dtype)


def sdpa_attention(
    q: Float[Tensor, "r h c e"],
    k: Float[Tensor, "r h s e"],
    v: Float[Tensor, "r h s f"],
    *,
    scale: float,
    mask: Bool[Tensor, "c s"] | None = None,
    bias: Float[Tensor, "r #h s"] | None = None,
) -> Float[Tensor, "r h c f"]:
    """`small_batch_attention` by torch's `scaled_dot_product_attention`."""
    if mask is None:
        mask_bias = torch.zeros((), dtype=q.dtype, device=q.device)
    else:
        mask_bias = _mask_to_bias(mask, q.dtype)
    if bias is not None:
        mask_bias = mask_bias + bias.detach().to(q.dtype)[:, :, None]
    y: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_bias if mask_bias.dim() else None, scale=scale)
    return y


def small_batch_attention_reference(
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


def _mask_to_bias(mask: Bool[Tensor, "c s"], dtype: torch.dtype) -> Float[Tensor, "c s"]:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


@compiler_disabled
def _apply_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    y: Tensor = _SmallBatchAttention.apply(q, k, v, mask, bias, scale)  # type: ignore[no-untyped-call]
    return y


class _SmallBatchAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float
    ) -> Tensor:
        runner = _BatchRunner(q, k, v, mask, bias)
        rows, heads, queries, _ = q.shape
        y = q.new_empty(rows, queries, heads, v.shape[-1]).transpose(1, 2)
        saves_weights = any(ctx.needs_input_grad) and q.shape[:3].numel() * k.shape[2] <= MAX_SAVED_WEIGHTS
        saved: list[Tensor] = []
        with autocast_disabled(q.device):
            for row_slice, head in runner.batch_slices():
                call = runner.call(row_slice, head)
                if saves_weights:
                    tile_weights = q.new_empty(call.shape)
                else:
                    tile_weights = runner.scratch("scores", *call.shape)
                tile_softmax.compute_weights(call, scale, runner.scratch("scores", *call.shape), tile_weights)
                tile_y = runner.scratch("y", *call.shape[:2], v.shape[-1])
                y[row_slice, head] = torch.bmm(tile_weights, call.v, out=tile_y)
                if saves_weights:
                    saved.append(tile_weights)
        ctx.save_for_backward(q, k, v, y, mask, bias, *saved)
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, mask, bias, *saved = ctx.saved_tensors
        if saved:
            runner = _BatchRunner(q, k, v)
        else:
            runner = _BatchRunner(q, k, v, mask, bias)
        delta = (grad_y * y).sum(-1, keepdim=True)
        saved = saved[::-1]
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        with autocast_disabled(q.device):
            for row_slice, head in runner.batch_slices():
                call = runner.call(row_slice, head)
                if saved:
                    tile_weights = saved.pop()
                else:
                    tile_weights = tile_softmax.recompute_weights(call, ctx.scale, runner.scratch)
                tile_grad_y = runner.contiguous("up", grad_y[row_slice, head])
                output_gradient = OutputGradient(tile_grad_y, delta[row_slice, head])
                tile_grads = [runner.scratch("to_q", *call.q.shape), grad_k[row_slice, head], grad_v[row_slice, head]]
                tile_softmax.compute_gradients(
                    call, tile_weights, output_gradient, runner.scratch, ctx.scale, tile_grads
                )
                grad_q[row_slice, head] = tile_grads[0]
        return grad_q, grad_k, grad_v, None, None, None


class _BatchRunner:
    """Iterates over slices of rows of one call's tensors; mask and bias are not needed where weights were saved."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> None:
        self.q = q
        self.k = k
        self.v = v
        self.mask = mask
        self.bias = bias
        self.scratch = ScratchBuffer(q)
        # often most rows have no bias
        if bias is None:
            self.has_bias = [False] * len(q)
        else:
            self.has_bias = (bias != 0).flatten(1).any(1).tolist()

    def batch_slices(self) -> Iterator[tuple[slice, int]]:
        """Slices of rows for each head, and the head."""
        rows, heads, queries, _ = self.q.shape
        step = max(PAIRS_PER_THREAD * torch.get_num_threads() // (queries * self.k.shape[2]), 1)
        for head in range(heads):
            for begin in range(0, rows, step):
                yield slice(begin, min(begin + step, rows)), head

    def call(self, row_slice: slice, head: int) -> TileCall:
        """The tensors of some rows of a head; valid until the next call."""
        q = self.contiguous("q", self.q[row_slice, head])
        mask_bias = None if self.mask is None else self.mask[None]
        if self.bias is not None and any(self.has_bias[row_slice]):
            bias = self.bias[row_slice, head if self.bias.shape[1] > 1 else 0, None]
            mask_bias = bias if mask_bias is None else mask_bias + bias
        return TileCall(q, self.k[row_slice, head], self.v[row_slice, head], mask_bias, None)

    def contiguous(self, name: str, x: Float[Tensor, "r c e"]) -> Float[Tensor, "r c e"]:
        """`x` in contiguous memory: products of widely strided rows take longer than copying them."""
        if x.is_contiguous():
            return x
        return self.scratch(name, *x.shape).copy_(x)
