"""Score functions of query-key pairs: dot product, cosine, bilinear, additive and distance kernels."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.head_selection import PerHeadTensors


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
