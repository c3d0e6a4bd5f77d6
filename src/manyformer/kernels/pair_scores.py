"""Scores of pairs: how well a query and a key match, by product, angle, distance or a small network."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class PairScore(nn.Module, ABC):
    """A number for each pair of a query and a key; both have as many heads, or one stands for all."""

    @abstractmethod
    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]: ...


@final
class DotProductScore(PairScore):
    """q.k times `scale`, 1 / sqrt(e) unless given (Vaswani et al. 2017, section 3.2.1); Luong et al. (2015) have 1."""

    def __init__(self, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        return q @ k.mT * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)


@final
class CosineScore(PairScore):
    """The cosine of the angle between them, over a learned temperature that begins at `temperature`."""

    def __init__(self, *, temperature: float = 0.1) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(_log_of("temperature", temperature)))

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * (-self.log).exp()


@final
class BilinearScore(PairScore):
    """q^T W k with a learned W for each head, which begins as 1 / sqrt(e) (Luong et al. 2015, "general")."""

    def __init__(self, key: int, *, heads: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(key).mul(key**-0.5).repeat(heads, 1, 1))

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        return q @ self.weight @ k.mT


@final
class AdditiveScore(PairScore):
    """v^T tanh(W q + U k) (Bahdanau et al. 2015, appendix A.1.2): forms a vector of `ff_dim` channels for each pair.

    Keys are as wide as queries, or `of` channels.
    """

    def __init__(self, query: int, ff_dim: int, *, of: int | None = None) -> None:
        super().__init__()
        self.query = nn.Linear(query, ff_dim, bias=False)
        self.key = nn.Linear(query if of is None else of, ff_dim, bias=False)
        self.energy = nn.Linear(ff_dim, 1, bias=False)

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s f"]) -> Float[Tensor, "*b l s"]:
        pairs = self.query(q)[..., :, None, :] + self.key(k)[..., None, :, :]
        found: Tensor = self.energy(pairs.tanh())[..., 0]
        return found


class _Apart(PairScore):
    """What depends on the distance over a bandwidth, which is learned or given."""

    def __init__(self, bandwidth: float, *, learned: bool = True) -> None:
        super().__init__()
        log = torch.tensor(_log_of("bandwidth", bandwidth))
        self.log: Tensor
        if learned:
            self.log = nn.Parameter(log)
        else:
            self.register_buffer("log", log)

    @property
    def bandwidth(self) -> float:
        """The bandwidth as it is now."""
        return float(self.log.detach().exp())

    def squared(self, q: Tensor, k: Tensor) -> Tensor:
        """Squared distances over the squared bandwidth; by differences, as products cancel where points are close."""
        return (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) * (-2 * self.log).exp()


@final
class GaussianScore(_Apart):
    """-|q - k|^2 / (2 bandwidth^2): with softmax, Nadaraya and Watson's regression.

    It is the scaled product where all keys are of one length and bandwidth^2 = sqrt(e).
    """

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        return -self.squared(q, k) / 2


@final
class LaplaceScore(_Apart):
    """-|q - k| / bandwidth."""

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        # the root has no slope at 0
        return -self.squared(q, k).clamp(min=1e-24).sqrt()


@final
class EpanechnikovScore(_Apart):
    """1 - |q - k|^2 / bandwidth^2: for `ReluWeights`, which leaves out all that is further than the bandwidth."""

    def forward(self, q: Float[Tensor, "*b l e"], k: Float[Tensor, "*b s e"]) -> Float[Tensor, "*b l s"]:
        return 1 - self.squared(q, k)


def _log_of(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} ({value}) must be above 0")
    return math.log(value)
