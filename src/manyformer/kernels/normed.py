"""Queries and keys of one length, so that old keys weigh as much as new ones."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Out, Place, State, Watch, ignore
from manyformer.kernels.base import Kernel
from manyformer.position import Position

EPSILON = 1e-6


@final
class Normed(Kernel):
    """`inner` over keys of length 1, and over queries of a length that each head learns, |s|, 1 at first.

    Query-key normalisation (Henry et al. 2020, arXiv:2010.04245) as in the Memorizing Transformer (Wu et al. 2022,
    section 3.2): values are left as they are. `inner` must not scale any more, as `Softmax(scale=1.0)`.
    """

    def __init__(self, inner: Kernel, heads: int) -> None:
        super().__init__()
        if inner.folds or inner.shares or inner.gates:
            raise ValueError(f"Normed: {type(inner).__name__} asks for keys of its own kind")
        self.inner, self.honours, self.sight = inner, inner.honours, inner.sight
        self.scale = nn.Parameter(torch.ones(heads))

    def start(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return self.inner.start(batch, device=device, dtype=dtype)

    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        at: Place,
        of: Place,
        position: Position,
        state: State = None,
        watch: Watch = ignore,
    ) -> Out:
        found: Out = self.inner(*self._normed(q, k), v, at, of, position, state, watch)
        return found

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Place,
        of: Place,
        position: Position,
        state: State = None,
        watch: Watch = ignore,
    ) -> str:
        return self.inner.explain(*self._normed(q, k), v, at, of, position, state, watch)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (q, k))
        return q * self.scale.abs().to(q.dtype)[:, None, None], k
