"""Learned feature maps, by which linear attention imitates the softmax attention of a trained model."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.head_selection import PerHeadTensors
from manyformer.kernels.features.feature_map import FeatureMap, FeatureValues, project_heads


@final
class T2RFeatures(FeatureMap, PerHeadTensors):
    """relu(W x + b) with W and b of each head, for queries and keys alike (Kasai et al. 2021, arXiv:2103.13076).

    Section 3.1, without the reduction of the scale of queries, which W contains. `heads` are those of keys; W begins as
    in `nn.Linear`, b as 0. Raises ValueError for sizes below 1."""

    head_axes = (("weight", -3), ("bias", -2))

    def __init__(self, key_dim: int, features: int, *, heads: int) -> None:
        super().__init__()
        for name, value in (("key_dim", key_dim), ("features", features), ("heads", heads)):
            if value < 1:
                raise ValueError(f"T2RFeatures: {name} ({value}) must be at least 1")
        bound = key_dim**-0.5
        self.weight = nn.Parameter(torch.empty(heads, features, key_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(heads, features))

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        bias = self.bias.repeat_interleave(x.shape[1] // len(self.bias), 0)[:, None]
        return FeatureValues((project_heads(x, self.weight) + bias.to(x.dtype)).relu())

    def extra_repr(self) -> str:
        heads, features, key_dim = self.weight.shape
        return f"{features} of {key_dim} channels, {heads} heads"


@final
class HedgehogFeatures(FeatureMap, PerHeadTensors):
    """softmax(W x) and softmax(-W x) with W of each head, the identity at first (Zhang et al. 2024, arXiv:2402.04347).

    Section 4.1; queries and keys have a map each, so `LinearKernel` takes two. The sum of weights is never 0. `heads`
    are those of the queries, or of the keys. Raises ValueError for sizes below 1."""

    head_axes = (("weight", -3),)

    def __init__(self, key_dim: int, *, heads: int) -> None:
        super().__init__()
        for name, value in (("key_dim", key_dim), ("heads", heads)):
            if value < 1:
                raise ValueError(f"HedgehogFeatures: {name} ({value}) must be at least 1")
        self.weight = nn.Parameter(torch.eye(key_dim).repeat(heads, 1, 1))

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        return FeatureValues(self.map(x))

    def map(self, x: Float[Tensor, "b h l e"]) -> Float[Tensor, "b h l r"]:
        """The features, which do not depend on positions."""
        scores = project_heads(x, self.weight)
        return torch.cat([scores.softmax(-1), (-scores).softmax(-1)], dim=-1)

    def extra_repr(self) -> str:
        heads, features, key_dim = self.weight.shape
        return f"{2 * features} of {key_dim} channels, {heads} heads"
