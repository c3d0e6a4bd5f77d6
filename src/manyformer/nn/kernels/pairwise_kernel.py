"""Attention with any score and weight function from all pairs, and Nadaraya-Watson regression with it."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.core import LayerOutput
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.masks.mask import AllKeys, Mask
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.torch_internals import autocast_disabled


class PairScore(nn.Module, ABC):
    """Computes one score for each query-key pair; queries and keys have equal numbers of heads, or one of them 1."""

    at_most_zero: ClassVar[bool] = False
    """Whether no score is positive."""

    @abstractmethod
    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]: ...


@final
class DotProductScore(PairScore):
    """q.k times `scale`, 1 / sqrt(e) unless set (Vaswani et al. 2017, section 3.2.1); Luong et al. (2015) use 1."""

    def __init__(self, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        return q @ k.mT * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)


@final
class CosineScore(PairScore):
    """The cosine of query and key divided by a learned temperature, initialized to `temperature`."""

    def __init__(self, *, temperature: float = 0.1) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(_positive_log("temperature", temperature)))

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * (-self.log).exp()


@final
class BilinearScore(PairScore, PerHeadTensors):
    """q^T W k with a learned W for each head, initially the identity over sqrt(e) (Luong et al. 2015, "general")."""

    head_axes = (("weight", -3),)

    def __init__(self, head_dim: int, *, heads: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).mul(head_dim**-0.5).repeat(heads, 1, 1))

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        return q @ self.weight @ k.mT


@final
class AdditiveScore(PairScore):
    """v^T tanh(W q + U k) (Bahdanau et al. 2015, appendix A.1.2), with `ff_dim` hidden channels for each pair.

    Keys have `key_dim` channels, by default as many as queries.
    """

    def __init__(self, query_dim: int, ff_dim: int, *, key_dim: int | None = None) -> None:
        super().__init__()
        self.query = nn.Linear(query_dim, ff_dim, bias=False)
        self.key = nn.Linear(query_dim if key_dim is None else key_dim, ff_dim, bias=False)
        self.energy = nn.Linear(ff_dim, 1, bias=False)

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s f"]) -> Float[Tensor, "*b l s"]:
        # (*b l s ff): every pair has hidden channels of its own
        pairs = self.query(q)[..., :, None, :] + self.key(k)[..., None, :, :]
        scores: Tensor = self.energy(pairs.tanh())[..., 0]
        return scores


class _DistanceScore(PairScore):
    """Scores of the distance divided by a bandwidth, which is learned or fixed."""

    def __init__(self, bandwidth: float, *, learned: bool = True) -> None:
        super().__init__()
        log = torch.tensor(_positive_log("bandwidth", bandwidth))
        self.log: Tensor
        if learned:
            self.log = nn.Parameter(log)
        else:
            self.register_buffer("log", log)

    @property
    def bandwidth(self) -> float:
        """The current bandwidth."""
        return float(self.log.detach().exp())

    def distances(self, q: Tensor, k: Tensor) -> Tensor:
        """Distances over the bandwidth, from differences: products of close points lose precision."""
        # torch has no kernel for narrower types
        wide = torch.promote_types(q.dtype, torch.float32)
        distances = torch.cdist(q.to(wide), k.to(wide), compute_mode="donot_use_mm_for_euclid_dist")
        return (distances * (-self.log).exp()).to(q.dtype)


@final
class GaussianScore(_DistanceScore):
    """-|q - k|^2 / (2 bandwidth^2): with softmax, Nadaraya-Watson regression.

    For keys of equal length and bandwidth^2 = sqrt(e) it equals the scaled dot product up to a constant.
    """

    at_most_zero = True

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        return -self.distances(q, k).square() / 2


@final
class LaplaceScore(_DistanceScore):
    """-|q - k| / bandwidth, with a gradient of 0 where query and key are equal."""

    at_most_zero = True

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        return -self.distances(q, k)


@final
class EpanechnikovScore(_DistanceScore):
    """1 - |q - k|^2 / bandwidth^2, for `ReluWeights`: keys beyond the bandwidth get weight 0."""

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        return 1 - self.distances(q, k).square()


def _positive_log(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} ({value}) must be above 0")
    return math.log(value)


class WeightFunction(nn.Module, ABC):
    """Maps scores to weights of visible keys and 0 for all other keys; a row without visible keys gets zeros."""

    @abstractmethod
    def forward(self, scores: Float[Tensor, "*b l s"], visible: Bool[Tensor, "*#b l s"]) -> Float[Tensor, "*b l s"]: ...


@final
class SoftmaxWeights(WeightFunction):
    """Softmax."""

    def forward(self, scores: Float[Tensor, "*b l s"], visible: Bool[Tensor, "*#b l s"]) -> Float[Tensor, "*b l s"]:
        has_visible = visible.any(-1, keepdim=True)
        # a row of -inf alone has no softmax: its weights are set to zero below
        scores = scores.masked_fill(~visible, -torch.inf).masked_fill(~has_visible, 0.0)
        return scores.softmax(-1).masked_fill(~visible, 0.0)


@final
class ReluWeights(WeightFunction):
    """relu(score)^power divided by their sum, or by `floor` if the sum is smaller.

    Power 2 is the squared ReLU. Keys with negative scores have weight 0, and so all weights of a row may be 0.
    """

    def __init__(self, *, power: int = 1, floor: float = 1e-6) -> None:
        super().__init__()
        if power < 1:
            raise ValueError(f"ReluWeights: power ({power}) must be at least 1")
        self.power = power
        self.floor = floor

    def forward(self, scores: Float[Tensor, "*b l s"], visible: Bool[Tensor, "*#b l s"]) -> Float[Tensor, "*b l s"]:
        weights = scores.relu().pow(self.power).masked_fill(~visible, 0.0)
        return weights / weights.sum(-1, keepdim=True).clamp(min=self.floor)

    def extra_repr(self) -> str:
        return f"power={self.power}, floor={self.floor}"


@final
class ReluMeanWeights(WeightFunction):
    """relu(score) over the number of visible keys (Wortsman et al. 2023, arXiv:2309.08586); they need not sum to 1."""

    def forward(self, scores: Float[Tensor, "*b l s"], visible: Bool[Tensor, "*#b l s"]) -> Float[Tensor, "*b l s"]:
        return scores.relu().masked_fill(~visible, 0.0) / visible.sum(-1, keepdim=True).clamp(min=1)


@final
class SoftpickWeights(WeightFunction):
    """relu(exp(score) - 1) over the sum of |exp(score) - 1| (Zuhri et al. 2025, Softpick, arXiv:2504.20966, section 3).

    Keys with negative scores have weight 0 and still divide the others, so that a query may attend to nothing and needs
    no token to keep its weight. Weights sum to 1 at most."""

    def forward(self, scores: Float[Tensor, "*b l s"], visible: Bool[Tensor, "*#b l s"]) -> Float[Tensor, "*b l s"]:
        # a hidden key with the score 0 has the weight 0 and adds nothing to the sum
        scores = scores.masked_fill(~visible, 0.0)
        # never below 0: exp(-largest) overflows where all scores of a row are far below it
        largest = scores.detach().amax(-1, keepdim=True).clamp(min=0)
        unit = (-largest).exp()
        # a difference of exponentials has no digits left where the score is small, and expm1 overflows where it is not
        differences = torch.where(scores > 1, (scores - largest).exp() - unit, unit * scores.clamp(max=1).expm1())
        smallest_sum = torch.finfo(scores.dtype).tiny
        return differences.relu() / differences.abs().sum(-1, keepdim=True).clamp(min=smallest_sum)


@final
class SigmoidWeights(WeightFunction):
    """sigmoid(score - log n), n the number of visible keys (Ramapuram et al. 2024, arXiv:2409.04431, section 3.3).

    Keys do not compete: the weights need not sum to 1, though at initialization their sum is close to 1.
    """

    def forward(self, scores: Float[Tensor, "*b l s"], visible: Bool[Tensor, "*#b l s"]) -> Float[Tensor, "*b l s"]:
        count = visible.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)
        # at scores of 0 the weights of n keys sum to about 1
        return (scores - count.log()).sigmoid().masked_fill(~visible, 0.0)


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
