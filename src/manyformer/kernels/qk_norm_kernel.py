"""Queries and keys of one length, so that old keys weigh as much as new ones."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.kernels.kernel import Kernel
from manyformer.position import Position

EPSILON = 1e-6


@final
class QKNormKernel(Kernel):
    """`inner` over keys of length 1, and over queries of a length that each head learns, |s|, 1 at first.

    Query-key normalisation (Henry et al. 2020, arXiv:2010.04245) as in the Memorizing Transformer (Wu et al. 2022,
    section 3.2): values are left as they are. `inner` must not scale any more, as `SoftmaxKernel(scale=1.0)`.
    """

    def __init__(self, inner: Kernel, heads: int) -> None:
        super().__init__()
        if inner.recurrent or inner.tied_qk or inner.gate_dim:
            raise ValueError(f"QKNormKernel: {type(inner).__name__} asks for keys of its own kind")
        self.inner, self.supports, self.cache_mask = inner, inner.supports, inner.cache_mask
        self.scale = nn.Parameter(torch.ones(heads))

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return self.inner.init_state(batch, device=device, dtype=dtype)

    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        found: LayerOutput = self.inner(*self._normed(q, k), v, query_positions, key_positions, position, state, watch)
        return found

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> str:
        return self.inner.explain(*self._normed(q, k), v, query_positions, key_positions, position, state, watch)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (q, k))
        return q * self.scale.abs().to(q.dtype)[:, None, None], k
