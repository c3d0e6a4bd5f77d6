"""Squared ReLU, with a gradient that neither compares again nor raises to a power."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, Primer, arXiv:2109.08668, section 3)."""
    y: Tensor = _SquaredReLU.apply(x)  # type: ignore[no-untyped-call]
    return y


class _SquaredReLU(torch.autograd.Function):
    """Saves relu(x), which is half of the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rectified = x.relu()
        ctx.save_for_backward(rectified)
        return rectified * rectified

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (rectified,) = ctx.saved_tensors
        dx: Tensor = (rectified * dy).mul_(2)
        return dx
