"""Feed-forward layers: position-wise projections to a wider space and back."""

from functools import partial
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyformer.nn.core import Context, Layer, LayerOutput, State, no_watch
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient


@final
class FeedForward(Layer):
    """Two projections with an activation between them (Vaswani et al. 2017, section 3.3).

    `ff_dim` is 4 dim by default."""

    keeps_tokens = False

    def __init__(
        self, dim: int, ff_dim: int | None = None, *, activation: nn.Module | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        ff_dim = 4 * dim if ff_dim is None else ff_dim
        self.up = nn.Linear(dim, ff_dim, bias=bias)
        self.down = nn.Linear(ff_dim, dim, bias=bias)
        self.activation = nn.ReLU() if activation is None else activation
        init_glorot(self.up, self.down)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if ctx.watch is not no_watch:
            ctx.watch(self, "input", x)
        return LayerOutput(self.down(self.activation(self.up(x))), state)


@final
class GatedFeedForward(Layer):
    """Two parallel projections, one the gate of the other (Shazeer 2020, section 2): down(act(gate(x)) * up(x)).

    `ff_dim` is 8/3 dim by default, rounded up to a multiple of 8: as many parameters as `FeedForward` has.
    SiLU as activation gives SwiGLU, GELU gives GEGLU."""

    keeps_tokens = False

    def __init__(
        self, dim: int, ff_dim: int | None = None, *, activation: nn.Module | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        ff_dim = default_gated_dim(dim) if ff_dim is None else ff_dim
        self.gate = nn.Linear(dim, ff_dim, bias=bias)
        self.up = nn.Linear(dim, ff_dim, bias=bias)
        self.down = nn.Linear(ff_dim, dim, bias=bias)
        self.activation = nn.SiLU() if activation is None else activation
        init_glorot(self.gate, self.up, self.down)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if ctx.watch is not no_watch:
            ctx.watch(self, "input", x)
        return LayerOutput(self.down(self.activation(self.gate(x)) * self.up(x)), state)


@final
class ChunkedLayer(Layer):
    """A position-wise layer applied to chunks of `size` tokens (Kitaev et al. 2020, section 3).

    The wide activations exist for one chunk at a time and are recomputed for the gradient. Raises ValueError for a
    layer that mixes tokens."""

    keeps_tokens = False

    def __init__(self, inner: Layer, size: int) -> None:
        super().__init__()
        if not isinstance(inner, FeedForward | GatedFeedForward):
            raise ValueError(f"ChunkedLayer: a {type(inner).__name__} may mix tokens, so it cannot be chunked")
        if size < 1:
            raise ValueError(f"ChunkedLayer: size ({size}) must be at least 1 token")
        self.inner = inner
        self.size = size

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if x.shape[1] <= self.size:
            return self.inner(x, ctx, state)

        def run_chunk(chunk: Tensor) -> Tensor:
            # no state: a layer that keeps no tokens has none
            return self.inner(chunk, ctx).y

        # recomputed chunk by chunk in the backward pass, or the wide activations of all chunks would be kept for it
        run = partial(checkpoint, run_chunk, use_reentrant=False) if torch.is_grad_enabled() else run_chunk
        return LayerOutput(torch.cat([run(chunk) for chunk in torch.split(x, self.size, dim=1)], 1), state)

    def extra_repr(self) -> str:
        return f"{self.size} tokens at a time"


def chunked(layer: Layer, size: int | None) -> Layer:
    """`layer` applied to chunks of `size` tokens; None leaves it as it is."""
    if size is None:
        return layer
    return ChunkedLayer(layer, size)


def default_gated_dim(dim: int) -> int:
    """8/3 dim rounded up to a multiple of 8, so that three matrices have as many parameters as two of 4 dim."""
    # a multiple of 8, which matrix units prefer
    return (8 * dim // 3 + 7) // 8 * 8


def init_glorot(*layers: nn.Linear) -> None:
    """Initialize weights with Glorot's uniform distribution, and biases with 0."""
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


@final
class SquaredReLU(nn.Module):
    """relu(x)^2, as an activation."""

    def forward(self, x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return squared_relu(x)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, Primer, arXiv:2109.08668, section 3)."""
    y: Tensor = _SquaredReLU.call(x)
    return y


class _SquaredReLU(HandwrittenGradient):
    """Saves relu(x), which is half of the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rectified = x.relu()
        ctx.save_for_backward(rectified)
        return rectified * rectified

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (rectified,) = ctx.saved_tensors
        dx: Tensor = (rectified * dy).mul_(2)
        return dx
