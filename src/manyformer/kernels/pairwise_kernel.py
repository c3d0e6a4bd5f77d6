"""Attention with any score and any weights, every pair written out; regression by the same means."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.autocast import autocast_disabled
from manyformer.core import LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.kernels.kernel import Kernel
from manyformer.kernels.pair_scores import DotProductScore, GaussianScore, PairScore
from manyformer.kernels.weight_functions import SoftmaxWeights, WeightFunction
from manyformer.masks import AllKeys, Mask
from manyformer.position import Position


@final
class PairwiseKernel(Kernel):
    """Attention whose weights are `weights` of `score` under a mask; `DotProductScore` and `SoftmaxWeights` are the
    usual ones.

    Every pair is formed, in float32 at least: time and memory are quadratic, and there is no faster form.
    """

    supports = frozenset({"query", "key", "score", "value"})

    def __init__(
        self, score: PairScore | None = None, weights: WeightFunction | None = None, mask: Mask | None = None
    ) -> None:
        super().__init__()
        self.score = DotProductScore() if score is None else score
        self.weights = SoftmaxWeights() if weights is None else weights
        self.mask = AllKeys() if mask is None else mask

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
        wide = torch.promote_types(q.dtype, torch.float32)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with autocast_disabled(q.device):
            scores = position.score(self.score(q.to(wide), k.to(wide)), q, k, query_positions, key_positions)
            weights = self.weights(scores, self.mask.dense(query_positions, key_positions, q.shape[1])).to(v.dtype)
        watch(self, "weights", weights)
        return LayerOutput(position.value(weights @ v, weights, query_positions, key_positions), state)

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
        return f"pairs: {type(self.score).__name__} and {type(self.weights).__name__} have no other form"

    def extra_repr(self) -> str:
        return repr(self.mask)


def nadaraya_watson(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n f"],
    query: Float[Tensor, "m d"],
    *,
    kernel: PairScore | None = None,
    weights: WeightFunction | None = None,
) -> Float[Tensor, "m f"]:
    """Regression as attention (Nadaraya 1964, Watson 1964): means of y weighted by how near x is to each query.

    `kernel` is `GaussianScore(1.0)` unless given; train its bandwidth with `leave_one_out`. For kernels that end, such
    as `EpanechnikovScore`, `weights` is `ReluWeights()`; a query without a neighbour gets zeros."""
    seen = torch.ones(len(query), len(x), dtype=torch.bool, device=x.device)
    return _weighted(x, query, seen, kernel, weights) @ y


def leave_one_out(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n f"],
    *,
    kernel: PairScore | None = None,
    weights: WeightFunction | None = None,
) -> Float[Tensor, ""]:
    """The mean squared error of predicting each y from all others, whose minimum is a good bandwidth."""
    others = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    return (_weighted(x, x, others, kernel, weights) @ y - y).square().mean()


def _weighted(
    x: Tensor, query: Tensor, seen: Tensor, kernel: PairScore | None, weights: WeightFunction | None
) -> Tensor:
    kernel = GaussianScore(1.0, learned=False).to(x) if kernel is None else kernel
    found: Tensor = (SoftmaxWeights() if weights is None else weights)(kernel(query, x), seen)
    return found
