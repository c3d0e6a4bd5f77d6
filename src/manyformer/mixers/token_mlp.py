"""A feed-forward layer along the token axis (MLP-Mixer)."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, ContiguousLayout, Layer, LayerOutput, State
from manyformer.feedforward import init_glorot


@final
class TokenMLP(Layer):
    """Two projections along the token axis with an activation between, shared by channels (Tolstikhin et al. 2021).

    Section 2 of MLP-Mixer. Its weights are for exactly `tokens` tokens. Raises ValueError for any other number, for
    padding or packing, and for a decoding state.
    """

    def __init__(self, tokens: int, ff_dim: int, *, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.tokens = tokens
        self.up = nn.Linear(tokens, ff_dim)
        self.down = nn.Linear(ff_dim, tokens)
        self.activation = nn.GELU() if activation is None else activation
        init_glorot(self.up, self.down)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        raise ValueError("TokenMLP cannot continue from a state: a later token changes all earlier outputs")

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if not isinstance(ctx.positions.layout, ContiguousLayout):
            raise ValueError("TokenMLP has a weight for each column of the row: it allows neither padding nor packing")
        if x.shape[1] != self.tokens:
            raise ValueError(f"TokenMLP mixes exactly {self.tokens} tokens, not {x.shape[1]}")
        return LayerOutput(self.down(self.activation(self.up(x.transpose(1, 2)))).transpose(1, 2))

    def extra_repr(self) -> str:
        return f"{self.tokens} tokens"
