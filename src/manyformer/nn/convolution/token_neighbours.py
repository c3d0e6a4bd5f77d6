"""Layers that let a token see the few before it: a gated smear of the embedding, and convolutions around branches."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.convolution.depthwise_convolution import ConvolutionTokens, ShortConvolution, previous_tokens
from manyformer.nn.core import Context, Layer, LayerOutput, State, no_watch
from manyformer.nn.feed_forward.feedforward import FeedForward, GatedFeedForward, init_glorot
from manyformer.nn.runtime.training_hooks import OptimizerHints

SMEAR_CHANNELS = 24
"""The channels of a token that its gate reads; models of public speedruns have as many."""


@final
class Smear(Layer, OptimizerHints):
    """x_t + scale sigmoid(w x_t[:24]) x_(t-1), with the token before in its document, if there is one.

    `scale` is learned and 0 at first, so that the layer begins as the identity."""

    adamw_weights = ("gate.weight",)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.gate_channels = min(dim, SMEAR_CHANNELS)
        self.gate = nn.Linear(self.gate_channels, 1, bias=False)
        self.scale = nn.Parameter(torch.zeros(1))
        init_glorot(self.gate)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return ConvolutionTokens.empty(batch, 1, self.dim, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        previous, state = previous_tokens(x, ctx.positions, state)
        gate = self.scale.to(x.dtype) * torch.sigmoid(self.gate(x[..., : self.gate_channels]))
        return LayerOutput(x + gate.to(x.dtype) * previous, state)


@final
class ConvolvedInput(Layer):
    """`inner` of the input plus a short convolution of it (Allen-Zhu 2025, arXiv:2512.17351: canon layers A and C).

    Its state are the convolution's and that of `inner`."""

    def __init__(self, inner: Layer, dim: int, size: int = 4) -> None:
        super().__init__()
        self.inner = inner
        self.short_convolution = ShortConvolution(dim, size, residual=True)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        convolved = self.short_convolution.init_state(batch, device=device, dtype=dtype)
        return [convolved, self.inner.init_state(batch, capacity=capacity, device=device, dtype=dtype)]

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        convolved, inner_state = (None, None) if state is None else state
        (x,), convolved = self.short_convolution([x], ctx.positions, convolved)
        y, inner_state, loss = self.inner(x, ctx, inner_state)
        return LayerOutput(y, None if state is None else [convolved, inner_state], loss)


@final
class ConvolvedHidden(Layer):
    """A feed-forward layer, plain or gated whose hidden channels are convolved before the activation (canon D)."""

    def __init__(self, inner: FeedForward | GatedFeedForward, size: int = 4) -> None:
        super().__init__()
        self.inner = inner
        maps = 2 if isinstance(inner, GatedFeedForward) else 1
        self.short_convolution = ShortConvolution(maps * inner.up.out_features, size, residual=True)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return self.short_convolution.init_state(batch, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if ctx.watch is not no_watch:
            ctx.watch(self.inner, "input", x)
        inner = self.inner
        if isinstance(inner, GatedFeedForward):
            (gate, up), state = self.short_convolution([inner.gate(x), inner.up(x)], ctx.positions, state)
            hidden = inner.activation(gate) * up
        else:
            (up,), state = self.short_convolution([inner.up(x)], ctx.positions, state)
            hidden = inner.activation(up)
        return LayerOutput(inner.down(hidden), state)
