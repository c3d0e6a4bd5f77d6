"""The Conformer's convolution module: a gate, a depthwise convolution along time, and a norm."""

from typing import Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.core import (
    PADDING_SEGMENT,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    PackedLayout,
    State,
    TokenPositions,
)
from manyformer.errors import UserError
from manyformer.feedforward import init_glorot
from manyformer.mixers.separable_conv import ConvolutionTokens, convolve_neighbours

ConvolutionNorm = Literal["batch", "layer"]


@final
class ConvolutionModule(Layer):
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
        self.size, self.causal = size, causal
        self.gate_and_up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.depthwise = nn.Parameter(torch.randn(size, dim) / size**0.5)
        self.norm = nn.BatchNorm1d(dim) if norm == "batch" else nn.LayerNorm(dim)
        init_glorot(self.gate_and_up, self.down)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return ConvolutionTokens.empty(batch, self.size - 1, self.depthwise.shape[1], device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        gated = F.glu(self.gate_and_up(x), -1)
        rows = None if state is not None else _one_document_rows(gated, ctx.positions)
        if rows is None:
            y, state = convolve_neighbours(gated, self.depthwise, ctx.positions, state, causal=self.causal)
        else:
            y = self._convolve_rows(rows)
        return LayerOutput(self.down(F.silu(self._normalize(y, ctx.positions))), state)

    def _convolve_rows(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """The convolution of rows that are one document each, by torch's fused kernel."""
        padding = self.size - 1 if self.causal else self.size // 2
        y = F.conv1d(x.transpose(1, 2), self.depthwise.mT[:, None], padding=padding, groups=x.shape[2])
        return y[..., : x.shape[1]].transpose(1, 2)

    def _normalize(self, y: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if isinstance(self.norm, nn.LayerNorm) or not self.training or isinstance(positions.layout, ContiguousLayout):
            normed: Tensor = self.norm(y.flatten(0, 1)).view_as(y)
            return normed
        valid: Bool[Tensor, "b l"] = (positions.segment_ids != PADDING_SEGMENT).expand(y.shape[:2])
        return torch.zeros_like(y).masked_scatter(valid[..., None], self.norm(y[valid]))

    def extra_repr(self) -> str:
        return f"size={self.size}, {'causal' if self.causal else 'bidirectional'}"


def _one_document_rows(x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"] | None:
    """The rows with zeros in place of padding, if each row is known to be one document that begins it; else None."""
    if isinstance(positions.layout, ContiguousLayout):
        return x
    if isinstance(positions.layout, PackedLayout) and positions.layout.right_padded:
        return x.masked_fill((positions.segment_ids == PADDING_SEGMENT)[..., None], 0.0)
    return None
