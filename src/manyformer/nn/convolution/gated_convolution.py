"""The layer of LFM2: a short convolution between two gates of the token, in the place of attention."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.convolution.depthwise_convolution import (
    ConvolutionTokens,
    convolve_neighbours,
    convolve_rows,
    one_document_rows,
)
from manyformer.nn.core import Context, Layer, LayerOutput, State
from manyformer.nn.feed_forward.feedforward import init_glorot
from manyformer.nn.runtime.training_hooks import FusedRows


@final
class GatedConvolution(Layer, FusedRows):
    """W_o (c * conv(b * x)) with (b, c, x) = W u, a causal depthwise convolution over `size` tokens of a document.

    Amini et al. 2025, LFM2 Technical Report, arXiv:2511.23404, section 2: there is no activation, gates are products.
    The state of a row is its last `size` - 1 inputs of the convolution. Raises ValueError for a size below 1."""

    def __init__(self, dim: int, size: int = 3) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"GatedConvolution: size ({size}) must be at least 1 token")
        self.dim = dim
        self.in_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.weight = nn.Parameter(torch.empty(size, dim))
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize like torch's convolutions and Glorot's uniform distribution."""
        nn.init.uniform_(self.weight, -(len(self.weight) ** -0.5), len(self.weight) ** -0.5)
        init_glorot(self.in_proj, self.out_proj)

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj.weight": (self.dim,) * 3}

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return ConvolutionTokens.empty(batch, len(self.weight) - 1, self.dim, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        input_gate, output_gate, x = self.in_proj(x).chunk(3, -1)
        gated = input_gate * x
        weight = self.weight.to(gated.dtype)
        rows = None
        if state is None:
            rows = one_document_rows(gated, ctx.positions)
        if rows is None:
            y, state = convolve_neighbours(gated, weight, ctx.positions, state, causal=True)
        else:
            y = convolve_rows(rows, weight, causal=True)
        return LayerOutput(self.out_proj(output_gate * y), state)

    def extra_repr(self) -> str:
        return f"{len(self.weight)} tokens"
