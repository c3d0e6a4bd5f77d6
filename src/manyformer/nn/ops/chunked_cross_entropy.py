"""Cross-entropy of a projection to many classes that never holds the logits of all tokens.

`torch.nn.functional.linear_cross_entropy` does the same from torch 2.13 on, without label smoothing and without
autocast; this one is the same with every torch, and in the precision of the run.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.torch_internals import autocast_disabled, autocast_dtype


class LossOptions(NamedTuple):
    """How targets are read, and how many tokens have their logits at a time."""

    ignore_index: int
    label_smoothing: float
    tokens_per_chunk: int


def chunked_cross_entropy(
    x: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    bias: Float[Tensor, " v"] | None,
    targets: Int[Tensor, " n"],
    options: LossOptions,
) -> Float[Tensor, ""]:
    """The summed `torch.nn.functional.cross_entropy` of the logits x W^T + b, with gradients of x, W and b.

    Under autocast the products take its precision; sums of exponentials and of gradients are at least of float32. In
    float16 only the logits do: gradients are formed here before any scale of the loss reaches them."""
    dtype = autocast_dtype(x.device) or x.dtype
    total: Tensor = _ChunkedCrossEntropy.call(x, weight, bias, targets, options, dtype)
    return total


class _ChunkedCrossEntropy(HandwrittenGradient):
    """Forms the gradients in the forward pass, while a chunk's logits are at hand, so that none is computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LossOptions,
        dtype: torch.dtype,
    ) -> Tensor:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        sum_dtype = torch.promote_types(x.dtype, torch.float32)
        with autocast_disabled(x.device):
            matrix = weight.to(dtype)
            # unscaled gradients of float16 would vanish
            gradient_dtype = sum_dtype if dtype is torch.float16 else dtype
            gradient_matrix = weight.to(gradient_dtype)
            offset = None if bias is None else bias.to(dtype)
            total = x.new_zeros((), dtype=sum_dtype)
            x_grad = torch.empty_like(x) if needs_x else None
            weight_grad = None
            if needs_weight:
                weight_grad = torch.zeros_like(weight, dtype=sum_dtype)
            bias_grad = None
            if needs_bias and bias is not None:
                bias_grad = torch.zeros_like(bias, dtype=sum_dtype)
            # on a CPU new memory for each chunk takes as long as a product
            memory = x.new_empty(min(options.tokens_per_chunk, x.shape[0]), weight.shape[0], dtype=dtype)
            for begin in range(0, x.shape[0], options.tokens_per_chunk):
                rows = slice(begin, begin + options.tokens_per_chunk)
                features = x[rows].to(dtype)
                logits = torch.mm(features, matrix.mT, out=memory[: len(features)])
                if offset is not None:
                    logits += offset
                chunk = _measure(logits.to(sum_dtype), targets[rows, None], options)
                total = total + chunk.loss
                if bias_grad is not None:
                    bias_grad.addmv_(chunk.gradient.mT, chunk.factors[:, 0])
                logit_grad = chunk.gradient.to(gradient_dtype)
                if x_grad is not None:
                    x_grad[rows] = (logit_grad @ gradient_matrix) * chunk.factors
                if weight_grad is not None:
                    _add_product(weight_grad, logit_grad, (features * chunk.factors).to(gradient_dtype))
        ctx.save_for_backward(
            x_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None or bias is None else bias_grad.to(bias.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if saved is None else saved * grad.to(saved.dtype) for saved in ctx.saved_tensors]
        return *gradients, None, None, None

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        x, weight, bias, targets, options, dtype = arguments
        with autocast_disabled(x.device):
            logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
            return F.cross_entropy(
                logits.to(torch.promote_types(x.dtype, torch.float32)),
                targets,
                ignore_index=options.ignore_index,
                label_smoothing=options.label_smoothing,
                reduction="sum",
            )


class _ChunkLoss(NamedTuple):
    """The summed loss of a chunk, and its gradient by the logits, each row of which is still to be multiplied."""

    loss: Float[Tensor, ""]
    gradient: Float[Tensor, "c v"]
    factors: Float[Tensor, "c 1"]


def _measure(logits: Float[Tensor, "c v"], targets: Int[Tensor, "c 1"], options: LossOptions) -> _ChunkLoss:
    """The loss of a chunk and its gradient, which takes the memory of the logits.

    Probabilities are left without their normalizer, and tokens without a target are not set to zero: both are one
    factor a row, which costs less in the products with features than a pass over all classes."""
    smoothing = options.label_smoothing
    is_scored = targets != options.ignore_index
    # any class will do where none is asked for
    classes = targets.where(is_scored, 0)
    # cancels in the loss, and keeps exponentials below 1
    logits -= logits.amax(-1, keepdim=True)
    losses = (smoothing - 1) * logits.gather(1, classes)
    if smoothing:
        losses = losses - smoothing * logits.mean(-1, keepdim=True)
    exponentials = logits.exp_()
    normalizers = exponentials.sum(-1, keepdim=True)
    losses = losses + normalizers.log()
    if smoothing:
        exponentials -= normalizers * (smoothing / logits.shape[-1])
    # softmax minus the target's distribution, times the normalizer
    exponentials.scatter_add_(1, classes, (smoothing - 1) * normalizers)
    return _ChunkLoss(losses.where(is_scored, 0.0).sum(), exponentials, is_scored / normalizers)


def _add_product(total: Float[Tensor, "v d"], a: Float[Tensor, "c v"], b: Float[Tensor, "c d"]) -> None:
    if a.dtype == total.dtype:
        # the form that counters of operations know
        torch.addmm(total, a.mT, b, out=total)
    else:
        total.add_(a.mT @ b)
