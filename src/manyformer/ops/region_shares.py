"""The share of attention that goes to each of several regions of keys."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def region_shares(
    weights: Float[Tensor, "b h l s"], sizes: list[int], valid: Bool[Tensor, "b l"]
) -> Float[Tensor, " regions"]:
    """Mean total weight of the valid queries on each of the adjacent regions of `sizes` keys."""
    return torch.stack([part.sum(-1).mean(1)[valid].mean() for part in torch.split(weights, sizes, -1)])
