"""Depthwise separable convolutions along a text."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.feedforward import init_glorot
from manyformer.ops.depthwise_convolution import ConvolutionTokens, convolve_neighbours


@final
class SeparableConv(Layer):
    """A depthwise convolution over `size` neighbours, then a projection to `out_dim` (Chollet 2017, section 2).

    Neighbours are tokens of the same document including the token itself: if `causal`, the token and earlier ones; else
    equally many on either side. Missing neighbours count as zeros. Raises ValueError for an even size unless causal.
    """

    def __init__(self, dim: int, out_dim: int, size: int, *, causal: bool) -> None:
        super().__init__()
        if size < 1 or (not causal and size % 2 == 0):
            raise ValueError(f"SeparableConv: size ({size}) must be at least 1, and odd unless causal")
        self.size = size
        self.causal = causal
        self.depthwise = nn.Parameter(torch.randn(size, dim) / size**0.5)
        self.pointwise = nn.Linear(dim, out_dim)
        init_glorot(self.pointwise)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return ConvolutionTokens.empty(batch, self.size - 1, self.depthwise.shape[1], device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        y, state = convolve_neighbours(x, self.depthwise, ctx.positions, state, causal=self.causal)
        return LayerOutput(self.pointwise(y), state)

    def extra_repr(self) -> str:
        return f"size={self.size}, {'causal' if self.causal else 'bidirectional'}"
