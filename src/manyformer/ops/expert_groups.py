"""Tokens sorted by the expert that processes them, and the projections of all experts by three ways of matrix products.

Numbers of tokens per expert are data. A CPU reads them and makes one product for each expert. Elsewhere they stay on
the device: in a grouped product of torch, or where it has none for the dtype in blocks of tokens of one expert each.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyformer.device_reads import count_values
from manyformer.system.devices import device_kind

GROUPED_CAPABILITY = 9
"""The generation of cards from which on torch has a kernel for grouped products."""

GROUPED_ALIGNMENT = 8
"""Rows of 16-bit numbers that a grouped product takes have a multiple of this length."""


class ExpertGroups(ABC):
    """How rows, which are sorted by expert, are divided among the experts."""

    @abstractmethod
    def project(
        self, x: Float[Tensor, "n i"], weight: Float[Tensor, "e o i"], bias: Float[Tensor, "e o"] | None
    ) -> Float[Tensor, "n o"]:
        """Each row projected by the weight of its expert, and its bias added."""


@final
class CountedGroups(ExpertGroups):
    """Groups of numbers of rows that the host knows."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)

    def project(
        self, x: Float[Tensor, "n i"], weight: Float[Tensor, "e o i"], bias: Float[Tensor, "e o"] | None
    ) -> Float[Tensor, "n o"]:
        """One product for each expert that has any rows.

        Weights are split at once, because the gradient of single ones would be as large as all of them each."""
        weights = weight.unbind()
        biases = [None] * len(weights) if bias is None else bias.unbind()
        parts = zip(torch.split(x, self.counts), weights, biases, self.counts, strict=True)
        outputs = [F.linear(rows, weight, bias) for rows, weight, bias, count in parts if count]
        # no row at all: a product without rows, so that the result depends on the weights like any other
        if outputs:
            return torch.cat(outputs)
        return F.linear(x, weights[0], biases[0])


@final
class GroupedRows(ExpertGroups):
    """Groups that end at rows which only the device knows, for the grouped product of torch; every row is in a group.

    `experts` are the experts of the rows."""

    def __init__(self, experts: Int[Tensor, " n"], num_experts: int) -> None:
        self.experts = experts
        self.ends = count_values(experts, num_experts).cumsum(0).int()

    def project(
        self, x: Float[Tensor, "n i"], weight: Float[Tensor, "e o i"], bias: Float[Tensor, "e o"] | None
    ) -> Float[Tensor, "n o"]:
        x, weight, bias = _cast_by_autocast(x, weight, bias)
        y = F.grouped_mm(x, weight.mT, offs=self.ends)
        if bias is None:
            return y
        return y + bias.index_select(0, self.experts)

    @staticmethod
    def can_project(x: Tensor, weights: Sequence[Tensor]) -> bool:
        """Whether torch has a kernel for such rows and weights that reads nothing; its other ways loop on the host."""
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        else:
            dtype = x.dtype
        if dtype != torch.bfloat16 or device_kind(x.device).capability(x.device) < GROUPED_CAPABILITY:
            return False
        return all(side % GROUPED_ALIGNMENT == 0 for weight in weights for side in weight.shape[1:])


@final
class ExpertBlocks(ExpertGroups):
    """Blocks of equally many rows, each of one of the `experts`; the rows of a block without tokens enough are unused.

    Each block has its own copy of a weight while its product is computed."""

    def __init__(self, experts: Int[Tensor, " m"]) -> None:
        self.experts = experts

    def project(
        self, x: Float[Tensor, "n i"], weight: Float[Tensor, "e o i"], bias: Float[Tensor, "e o"] | None
    ) -> Float[Tensor, "n o"]:
        x, weight, bias = _cast_by_autocast(x, weight, bias)
        blocks = x.view(len(self.experts), -1, x.shape[1])
        y: Tensor = _BlockProduct.apply(blocks, weight, self.experts)  # type: ignore[no-untyped-call]
        if bias is not None:
            y = y + bias.index_select(0, self.experts)[:, None]
        return y.flatten(0, 1)


class _BlockProduct(torch.autograd.Function):
    """x W^T of each block; the copies of weights are made again for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, experts: Tensor) -> Float[Tensor, "m r o"]:
        ctx.save_for_backward(x, weight, experts)
        return x @ weight.index_select(0, experts).mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, experts = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.index_select(0, experts)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight).index_add_(0, experts, grad.mT @ x)
        return grad_x, grad_weight, None


def _cast_by_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The dtypes that `F.linear` would compute with: these products are not on the list of autocast."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
