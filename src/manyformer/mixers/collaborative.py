"""Attention whose heads share the dimensions of queries and keys, and differ in how much they count each."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.attention import AttentionState, own_source, split_heads
from manyformer.core import Context, Layer, Out, Place, State
from manyformer.kernels import Softmax
from manyformer.masks import Mask
from manyformer.position import NoPosition
from manyformer.sources import Source
from manyformer.sources.base import Shape


@final
class Collaborative(Layer):
    """Collaborative multi-head attention (Cordonnier et al. 2020, arXiv:2006.16362, section 3).

    In head h a query x gives a key y the score (m_h * (W_Q x)).(W_K y) + c_h.y over sqrt(shared / heads). W_Q and W_K,
    of width `shared`, serve all heads, and `mixing` holds the m_h: with `shared` = dim and each m_h 1 in a share of its
    own and 0 elsewhere it is ordinary attention. `content` holds the c_h, which is what biases of queries come to;
    those of keys give all keys of a query the same. Values are as in `Attention`. What is kept of a token is one key
    for all heads, and its values. It needs positions in the stream. Raises ValueError for widths that cannot be.
    """

    def __init__(
        self, dim: int, heads: int, mask: Mask | None = None, *, shared: int, source: Source | None = None
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads})")
        if shared < 1:
            raise ValueError(f"shared ({shared}) must be at least 1 dimension")
        self.heads, self.shared = heads, shared
        self.kernel = Softmax(mask, scale=(heads / shared) ** 0.5)
        self.source, self.position = own_source(self.kernel) if source is None else source, NoPosition()
        self.to_q, self.to_k = nn.Linear(dim, shared, bias=False), nn.Linear(dim, shared, bias=False)
        self.content = nn.Linear(dim, heads, bias=False)
        self.to_v, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.mixing = nn.Parameter(torch.empty(heads, shared))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform initialisation; mixing weights from N(0, 0.2^2), as in the published code."""
        for layer in (self.to_q, self.to_k, self.content, self.to_v, self.out):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        nn.init.normal_(self.mixing, std=0.2)

    def start(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        shape = Shape(1, self.shared + self.heads, self.to_v.out_features)
        kept = self.source.start(batch, shape, folds=False, capacity=capacity, device=device, dtype=dtype)
        return AttentionState(kept, self.kernel.start(batch, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        kept, folded = (None, None) if state is None else state
        keys = self.source(x, ctx, self._project, kept, folds=False)
        v = split_heads(keys.v[:, 0], self.heads)
        k = keys.k.expand(-1, self.heads, -1, -1)
        y = self.kernel(self._queries(x), k, v, ctx.place, keys.place, self.position, folded, ctx.watch).y
        y = self.out(y.transpose(1, 2).flatten(2))
        return Out(y, None if state is None else AttentionState(keys.state, folded), keys.loss)

    def extra_repr(self) -> str:
        return f"{self.heads} heads, shared={self.shared}"

    def _queries(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b h l e"]:
        """The mixed queries, and behind them a 1 for the head's own share of what keys have by themselves."""
        mixed = self.to_q(x)[:, None] * self.mixing[:, None]
        one = torch.eye(self.heads, dtype=x.dtype, device=x.device)[:, None].expand(x.shape[0], -1, x.shape[1], -1)
        return torch.cat([mixed, one.to(mixed.dtype)], dim=-1)

    def _project(self, x: Float[Tensor, "b s d"], place: Place) -> tuple[Tensor, Tensor]:
        return torch.cat([self.to_k(x), self.content(x)], dim=-1)[:, None], self.to_v(x)[:, None]
