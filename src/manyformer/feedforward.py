"""Feed-forward layers: each token by itself, through a wider space."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyformer.core import Context, Layer, LayerOutput, State


@final
class FeedForward(Layer):
    """Two projections with an activation between them (Vaswani et al. 2017, section 3.3).

    `ff_dim` is 4 dim unless given.
    """

    def __init__(
        self, dim: int, ff_dim: int | None = None, *, activation: nn.Module | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        ff_dim = 4 * dim if ff_dim is None else ff_dim
        self.up, self.down = nn.Linear(dim, ff_dim, bias=bias), nn.Linear(ff_dim, dim, bias=bias)
        self.activation = nn.ReLU() if activation is None else activation
        _glorot(self.up, self.down)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        ctx.watch(self, "input", x)
        return LayerOutput(self.down(self.activation(self.up(x))), state)


@final
class GatedFeedForward(Layer):
    """Two parallel projections, one the gate of the other (Shazeer 2020, section 2): down(act(gate(x)) * up(x)).

    `ff_dim` is 8/3 dim unless given, rounded up to a multiple of 8: as many parameters as `FeedForward` has.
    SiLU as activation gives SwiGLU, GELU gives GEGLU.
    """

    def __init__(
        self, dim: int, ff_dim: int | None = None, *, activation: nn.Module | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        ff_dim = (8 * dim // 3 + 7) // 8 * 8 if ff_dim is None else ff_dim
        self.gate, self.up = nn.Linear(dim, ff_dim, bias=bias), nn.Linear(dim, ff_dim, bias=bias)
        self.down = nn.Linear(ff_dim, dim, bias=bias)
        self.activation = nn.SiLU() if activation is None else activation
        _glorot(self.gate, self.up, self.down)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        ctx.watch(self, "input", x)
        return LayerOutput(self.down(self.activation(self.gate(x)) * self.up(x)), state)


@final
class ChunkedLayer(Layer):
    """A layer that treats each token by itself, given `size` tokens at a time (Kitaev et al. 2020, section 3).

    What is wide inside exists for so many tokens only; for the gradient it is computed again. Raises ValueError for a
    layer that lets tokens meet.
    """

    def __init__(self, inner: Layer, size: int) -> None:
        super().__init__()
        if not isinstance(inner, FeedForward | GatedFeedForward):
            raise ValueError(f"ChunkedLayer: the tokens of a {type(inner).__name__} may meet, so it needs all of them")
        if size < 1:
            raise ValueError(f"ChunkedLayer: size ({size}) must be at least 1 token")
        self.inner, self.size = inner, size

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if x.shape[1] <= self.size:
            return self.inner(x, ctx, state)

        def part(tokens: Tensor) -> Tensor:
            return self.inner(tokens, ctx).y

        parts = torch.split(x, self.size, dim=1)
        if torch.is_grad_enabled():
            return LayerOutput(torch.cat([checkpoint(part, tokens, use_reentrant=False) for tokens in parts], 1), state)
        return LayerOutput(torch.cat([part(tokens) for tokens in parts], 1), state)

    def extra_repr(self) -> str:
        return f"{self.size} tokens at a time"


def chunked(layer: Layer, size: int | None) -> Layer:
    """The layer, `size` tokens at a time; None means all at once."""
    return layer if size is None else ChunkedLayer(layer, size)


def _glorot(*layers: nn.Linear) -> None:
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
