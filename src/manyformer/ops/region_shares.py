"""How much of all attention goes to each of several regions of keys."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def shares(weights: Float[Tensor, "b h l s"], sizes: list[int], real: Bool[Tensor, "b l"]) -> Float[Tensor, " regions"]:
    """The mean weight that real queries give to each of the regions, which are of so many keys, side by side."""
    return torch.stack([part.sum(-1).mean(1)[real].mean() for part in torch.split(weights, sizes, -1)])
