"""Inputs of softmax attention, and what it makes of them."""

import torch
from torch import Tensor

from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn.core import TokenPositions
from manyformer.nn.positions import NoPosition

HEADS, KEY, VALUE = 4, 6, 5


def inputs(
    positions: TokenPositions, groups: int, key_positions: TokenPositions | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    keys = positions if key_positions is None else key_positions
    batch = positions.position_ids.shape[0]
    shapes = (
        (HEADS, positions.position_ids, KEY),
        (groups, keys.position_ids, KEY),
        (groups, keys.position_ids, VALUE),
    )
    return tuple(  # type: ignore[return-value]
        torch.randn(batch, heads, pos.shape[1], width, dtype=torch.float64, requires_grad=True)
        for heads, pos, width in shapes
    )


def run(
    kernel: SoftmaxKernel,
    qkv: tuple[Tensor, ...],
    grad_output: Tensor,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
) -> tuple[Tensor, ...]:
    """Outputs and the gradients of queries, keys and values."""
    y = kernel(KernelCall(*qkv, query_positions, key_positions, NoPosition())).y
    return y, *torch.autograd.grad((y * grad_output).sum(), qkv)
