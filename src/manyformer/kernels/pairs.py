"""Attention with any score and any weights, every pair written out; regression by the same means."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Out, Place, State, Watch, ignore
from manyformer.kernels.base import Kernel
from manyformer.kernels.scores import Gaussian, Product, Score
from manyformer.kernels.weights import Exponential, Weights
from manyformer.masks import Everything, Mask
from manyformer.position import Position
from manyformer.precision import full_precision


@final
class Pairs(Kernel):
    """Attention whose weights are `weights` of `score` under a mask; `Product` and `Exponential` are the usual ones.

    Every pair is formed, in float32 at least: time and memory are quadratic, and there is no faster form.
    """

    honours = frozenset({"query", "key", "score", "value"})

    def __init__(self, score: Score | None = None, weights: Weights | None = None, mask: Mask | None = None) -> None:
        super().__init__()
        self.score = Product() if score is None else score
        self.weights = Exponential() if weights is None else weights
        self.mask = Everything() if mask is None else mask

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
        wide = torch.promote_types(q.dtype, torch.float32)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with full_precision(q.device):
            scores = position.score(self.score(q.to(wide), k.to(wide)), q, k, at, of)
            weights = self.weights(scores, self.mask.dense(at, of, q.shape[1])).to(v.dtype)
        watch(self, "weights", weights)
        return Out(position.value(weights @ v, weights, at, of), state)

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
        return f"pairs: {type(self.score).__name__} and {type(self.weights).__name__} have no other form"

    def extra_repr(self) -> str:
        return repr(self.mask)


def nadaraya_watson(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n f"],
    query: Float[Tensor, "m d"],
    *,
    kernel: Score | None = None,
    weights: Weights | None = None,
) -> Float[Tensor, "m f"]:
    """Regression as attention (Nadaraya 1964, Watson 1964): means of y weighted by how near x is to each query.

    `kernel` is `Gaussian(1.0)` unless given; train its bandwidth with `leave_one_out`. For kernels that end, such as
    `Epanechnikov`, `weights` is `Rectified()`; a query without a neighbour gets zeros.
    """
    seen = torch.ones(len(query), len(x), dtype=torch.bool, device=x.device)
    return _weighted(x, query, seen, kernel, weights) @ y


def leave_one_out(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n f"],
    *,
    kernel: Score | None = None,
    weights: Weights | None = None,
) -> Float[Tensor, ""]:
    """The mean squared error of predicting each y from all others, whose minimum is a good bandwidth."""
    others = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    return (_weighted(x, x, others, kernel, weights) @ y - y).square().mean()


def _weighted(x: Tensor, query: Tensor, seen: Tensor, kernel: Score | None, weights: Weights | None) -> Tensor:
    kernel = Gaussian(1.0, learned=False).to(x) if kernel is None else kernel
    found: Tensor = (Exponential() if weights is None else weights)(kernel(query, x), seen)
    return found
