"""Depthwise convolutions along a sequence as layers: separable ones, and the module of the Conformer."""

from typing import Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn.convolution.depthwise_convolution import (
    ConvolutionTokens,
    convolve_neighbours,
    convolve_rows,
    one_document_rows,
)
from manyformer.nn.core import (
    PADDING_SEGMENT,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    PackedLayout,
    State,
    TokenPositions,
)
from manyformer.nn.feed_forward.feedforward import init_glorot
from manyformer.nn.runtime.device_reads import places_of
from manyformer.nn.runtime.training_hooks import FusedRows


@final
class SeparableConv(Layer):
    """A depthwise convolution over `size` neighbors, then a projection to `out_dim` (Chollet 2017, section 2).

    Neighbors are tokens of the same document including the token itself: if `causal`, the token and earlier ones; else
    equally many on either side. Missing neighbors count as zeros. Raises ValueError for an even size unless causal.
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


ConvolutionNorm = Literal["batch", "layer"]


@final
class ConvolutionModule(Layer, FusedRows):
    """W_2 swish(norm(depthwise(GLU(W_1 x)))) (Gulati et al. 2020, section 2.2), without the norm before it.

    The depthwise convolution sees `size` tokens of the same document: if `causal`, the token and earlier ones; else
    equally many on either side. Padding counts as zeros. The paper's `norm` is "batch": while training, its mean and
    deviation are those of all tokens of the batch that are not padding, so that rows, and times, are not independent;
    in evaluation they are running means. "layer" normalizes each token by itself. Raises UserError for an even size
    unless causal."""

    def __init__(self, dim: int, size: int, *, causal: bool = False, norm: ConvolutionNorm = "batch") -> None:
        super().__init__()
        if size < 1 or (not causal and size % 2 == 0):
            raise UserError(
                f"kernel_size ({size}) must be at least 1, and odd unless causal: it is centred on a position"
            )
        self.size = size
        self.causal = causal
        self.gate_and_up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(dim, dim, bias=False)
        self.depthwise = nn.Parameter(torch.randn(size, dim) / size**0.5)
        self.norm = nn.BatchNorm1d(dim) if norm == "batch" else nn.LayerNorm(dim)
        init_glorot(self.gate_and_up, self.down)

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"gate_and_up.weight": (self.depthwise.shape[1],) * 2}

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return ConvolutionTokens.empty(batch, self.size - 1, self.depthwise.shape[1], device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        gated = F.glu(self.gate_and_up(x), -1)
        rows = None
        if state is None:
            rows = one_document_rows(gated, ctx.positions)
        if rows is None:
            # the general form: tokens of other documents and padding count as zeros, and a state comes before them
            y, state = convolve_neighbours(gated, self.depthwise, ctx.positions, state, causal=self.causal)
        else:
            # every row is one document, which torch convolves faster than documents are told apart
            y = convolve_rows(rows, self.depthwise, causal=self.causal)
        return LayerOutput(self.down(F.silu(self._normalize(y, ctx.positions))), state)

    def _normalize(self, y: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if isinstance(self.norm, nn.LayerNorm) or not self.training or isinstance(positions.layout, ContiguousLayout):
            normed: Tensor = self.norm(y.flatten(0, 1)).view_as(y)
            return normed
        valid = (positions.segment_ids != PADDING_SEGMENT).expand(y.shape[:2])
        count = None
        if isinstance(positions.layout, PackedLayout):
            count = positions.layout.token_count
        places = places_of(valid.flatten(), count)
        tokens = y.flatten(0, 1)
        return torch.zeros_like(tokens).index_copy(0, places, self.norm(tokens.index_select(0, places))).view_as(y)

    def extra_repr(self) -> str:
        return f"size={self.size}, {'causal' if self.causal else 'bidirectional'}"
