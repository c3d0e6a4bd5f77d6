"""Attention with projections of its own for the few tokens that see everything."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.attention import split_heads
from manyformer.core import Context, Layer, Out, State
from manyformer.kernels import Softmax
from manyformer.masks import By, Mask, Not, To, Tokens
from manyformer.position import NoPosition


@final
class GlobalLocal(Layer):
    """Longformer's attention (Beltagy et al. 2020, arXiv:2004.05150, section 3.1).

    Tokens attend by `local`, and to the global ones, with one set of projections; global tokens attend to everything
    with another set, which starts as a copy of the first. Both share the output projection. It sees both sides, so it
    keeps no state.
    """

    def __init__(self, dim: int, heads: int, local: Mask, tokens: Tokens, *, dropout: float = 0.0) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        self.heads = heads
        self.to_q, self.to_kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.global_q, self.global_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        # each query in one of the two, zeros in the other
        self.local = Softmax((local | To(tokens)) & Not(By(tokens)), dropout=dropout)
        self.everywhere = Softmax(By(tokens), dropout=dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform initialisation; the global projections begin as the local ones."""
        for weight in (self.to_q.weight, *self.to_kv.weight.data.chunk(2), self.out.weight):
            nn.init.xavier_uniform_(weight.data)
        for layer in (self.to_q, self.to_kv, self.out):
            nn.init.zeros_(layer.bias)
        self.copy_projections()

    def copy_projections(self) -> None:
        """Let the global projections be what the local ones are now."""
        self.global_q.load_state_dict(self.to_q.state_dict())
        self.global_kv.load_state_dict(self.to_kv.state_dict())

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        if state:
            raise ValueError("GlobalLocal sees both sides of every token: it cannot go on from a state")
        sides = ((self.local, self.to_q, self.to_kv), (self.everywhere, self.global_q, self.global_kv))
        y = torch.zeros((), dtype=x.dtype, device=x.device)
        for kernel, to_q, to_kv in sides:
            q, (k, v) = split_heads(to_q(x), self.heads), to_kv(x).chunk(2, dim=-1)
            keys, values = split_heads(k, self.heads), split_heads(v, self.heads)
            y = y + kernel(q, keys, values, ctx.place, ctx.place, NoPosition(), None, ctx.watch).y
        return Out(self.out(y.transpose(1, 2).flatten(2)), state)
