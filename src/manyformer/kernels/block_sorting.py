"""Sorting networks of Sinkhorn attention: scores of blocks for positions (Tay et al. 2020, section 3.2)."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.head_selection import PerHeadTensors
from manyformer.training_hooks import UndecayedParameters


class SortingNetwork(PerHeadTensors, ABC):
    """Scores (n, h, b, b) of all key blocks for the slot of each query block; keys of absent tokens must be zeros.

    If `causal`, the scores of a slot depend only on the keys up to the first token of its block, and the scores of its
    own and of later blocks are undefined.
    """

    def __init__(self, heads: int, key_dim: int, *, causal: bool) -> None:
        super().__init__()
        for name, value in (("heads", heads), ("key", key_dim)):
            if value < 1:
                raise ValueError(f"{type(self).__name__}: {name} ({value}) must be at least 1")
        self.causal = causal

    @abstractmethod
    def forward(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None = None
    ) -> Float[Tensor, "n h b b"]: ...

    def describe_slots(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None
    ) -> Float[Tensor, "n h b i"]:
        """The input features of each slot: its mean key; if causal, the mean of all keys so far, and its first key."""
        if not self.causal:
            return block_means(k, present)
        first_keys = k[:, :, :, 0]
        # the own block is left out of the sum; adding and subtracting it would leak its later tokens by rounding
        earlier_sum = F.pad(k[:, :, :-1].sum(3).cumsum(2), (0, 0, 1, 0))
        num_earlier = torch.arange(k.shape[2], device=k.device)[:, None] * k.shape[3]
        return torch.cat([(earlier_sum + first_keys) / (num_earlier + 1), first_keys], dim=-1)


@final
class MLPSorting(SortingNetwork, UndecayedParameters):
    """W2 relu(W1 x + b1) with separate weights for each head, for up to `max_blocks` blocks (section 3.2, equation 2).

    x is a mean where the paper has a sum, so that it does not grow with the block. W2 has no bias: Sinkhorn
    normalization removes a constant of a column. Raises ValueError for more blocks.
    """

    undecayed = ("shift",)

    head_axes = (("up", -3), ("shift", -3), ("down", -3))

    def __init__(self, heads: int, key_dim: int, max_blocks: int, *, causal: bool, ff_dim: int | None = None) -> None:
        super().__init__(heads, key_dim, causal=causal)
        if max_blocks < 1:
            raise ValueError(f"MLPSorting: max_blocks ({max_blocks}) must be at least 1")
        input_dim = key_dim * (2 if causal else 1)
        ff_dim = 2 * key_dim if ff_dim is None else ff_dim
        self.up = _init_head_matrices(heads, input_dim, ff_dim)
        self.shift = nn.Parameter(torch.zeros(heads, 1, ff_dim))
        self.down = _init_head_matrices(heads, ff_dim, max_blocks)

    def forward(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None = None
    ) -> Float[Tensor, "n h b b"]:
        blocks = k.shape[2]
        max_blocks = self.down.shape[2]
        if blocks > max_blocks:
            raise ValueError(f"MLPSorting was built for max_blocks={max_blocks}, got {blocks} blocks")
        hidden = (self.describe_slots(k, present) @ self.up.to(k.dtype) + self.shift.to(k.dtype)).relu()
        return hidden @ self.down[:, :, :blocks].to(k.dtype)


@final
class BilinearSorting(SortingNetwork):
    """Scaled dot products of projected slot features and projected block means, for any number of blocks.

    A variant from released packages, which use queries and keys; this one uses keys alone, because those are cached
    during decoding.
    """

    head_axes = (("slot", -3), ("block", -3))

    def __init__(self, heads: int, key_dim: int, *, causal: bool) -> None:
        super().__init__(heads, key_dim, causal=causal)
        self.slot = _init_head_matrices(heads, key_dim * (2 if causal else 1), key_dim)
        self.block = _init_head_matrices(heads, key_dim, key_dim)

    def forward(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None = None
    ) -> Float[Tensor, "n h b b"]:
        slots = self.describe_slots(k, present) @ self.slot.to(k.dtype)
        blocks = block_means(k, present) @ self.block.to(k.dtype)
        return slots @ blocks.mT / math.sqrt(k.shape[-1])


def block_means(k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None) -> Float[Tensor, "n h b e"]:
    """The mean key of each block; zeros for a block without tokens."""
    if present is None:
        return k.mean(3)
    return k.sum(3) / present.sum(-1).clamp(min=1)[:, None, :, None].to(k.dtype)


def _init_head_matrices(heads: int, rows: int, columns: int) -> nn.Parameter:
    """One matrix for each head, with Glorot uniform initialization."""
    weight = torch.empty(heads, rows, columns)
    for head_weight in weight:
        nn.init.xavier_uniform_(head_weight)
    return nn.Parameter(weight)
