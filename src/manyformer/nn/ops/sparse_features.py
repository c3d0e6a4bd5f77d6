"""The product of a matrix with few values in each row and a matrix of weights."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def sparse_product(
    values: Float[Tensor, "n k"], columns: Int[Tensor, "n k"], weight: Float[Tensor, "f d"]
) -> Float[Tensor, "n d"]:
    """y_i = sum_k values_ik weight[columns_ik], without a gradient of the values."""
    y: Tensor = _SparseProduct.apply(values.detach(), columns, weight)  # type: ignore[no-untyped-call]
    return y


class _SparseProduct(torch.autograd.Function):
    """torch's own gradient of `embedding_bag` sorts the columns anew in each step."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(values, columns)
        ctx.features = len(weight)
        return F.embedding_bag(columns, weight, per_sample_weights=values, mode="sum")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        values, columns = ctx.saved_tensors
        # dropout and padding leave zeros, which need no product
        rows, slots = values.nonzero(as_tuple=True)
        messages = gradient.index_select(0, rows).mul_(values[rows, slots][:, None])
        weight_gradient = gradient.new_zeros(ctx.features, gradient.shape[1])
        return None, None, weight_gradient.index_add_(0, columns[rows, slots], messages)
