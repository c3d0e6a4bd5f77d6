"""Attention with any score and weight function from all pairs, and Nadaraya-Watson regression with it."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import LayerOutput
from manyformer.kernels.kernel import Kernel, KernelCall
from manyformer.kernels.pair_scores import DotProductScore, GaussianScore, PairScore
from manyformer.kernels.weight_functions import SoftmaxWeights, WeightFunction
from manyformer.masks import AllKeys, Mask
from manyformer.torch_internals import autocast_disabled


@final
class PairwiseKernel(Kernel):
    """Attention with the weight function `weights` of the scores `score` under a mask; defaults are dot product and
    softmax.

    All pairs are formed, in float32 at least: time and memory are quadratic, and there is no faster path.
    """

    supports = frozenset({"query", "key", "score", "value"})

    def __init__(
        self, score: PairScore | None = None, weights: WeightFunction | None = None, mask: Mask | None = None
    ) -> None:
        super().__init__()
        self.score = DotProductScore() if score is None else score
        self.weights = SoftmaxWeights() if weights is None else weights
        self.mask = AllKeys() if mask is None else mask
        self.scores_at_most_zero = self.score.at_most_zero

    def forward(self, call: KernelCall) -> LayerOutput:
        q = call.q
        query_positions = call.query_positions
        key_positions = call.key_positions
        position = call.position
        compute_dtype = torch.promote_types(q.dtype, torch.float32)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (call.k, call.v))
        with autocast_disabled(q.device):
            scores = self.score(q.to(compute_dtype), k.to(compute_dtype))
            scores = position.score(scores, q, k, query_positions, key_positions)
            weights = self.weights(scores, self.mask.dense(query_positions, key_positions, q.shape[1])).to(v.dtype)
        call.watch(self, "weights", weights)
        return LayerOutput(position.value(weights @ v, weights, query_positions, key_positions), call.state)

    def explain(self, call: KernelCall) -> str:
        return f"pairs: {type(self.score).__name__} and {type(self.weights).__name__} have no other path"

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
    """Regression as attention (Nadaraya 1964, Watson 1964): means of y weighted by the closeness of x to each query.

    `kernel` is `GaussianScore(1.0)` by default; train its bandwidth with `leave_one_out`. For kernels of compact
    support, such as `EpanechnikovScore`, use `weights=ReluWeights()`; a query without neighbours gets zeros."""
    visible = torch.ones(len(query), len(x), dtype=torch.bool, device=x.device)
    return _pair_weights(x, query, visible, kernel, weights) @ y


def leave_one_out(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n f"],
    *,
    kernel: PairScore | None = None,
    weights: WeightFunction | None = None,
) -> Float[Tensor, ""]:
    """The mean squared error of predicting each y from all other points; minimize it to choose a bandwidth."""
    visible = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    return (_pair_weights(x, x, visible, kernel, weights) @ y - y).square().mean()


def _pair_weights(
    x: Tensor, query: Tensor, visible: Tensor, kernel: PairScore | None, weights: WeightFunction | None
) -> Tensor:
    if kernel is None:
        kernel = GaussianScore(1.0, learned=False).to(x)
    pair_weights: Tensor = (SoftmaxWeights() if weights is None else weights)(kernel(query, x), visible)
    return pair_weights
