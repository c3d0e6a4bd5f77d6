"""Which block should stand beside which: the sorting network of Sinkhorn attention (Tay et al. 2020, section 3.2)."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn


class SortingNetwork(nn.Module, ABC):
    """Scores of all blocks for the slot beside each block, from keys in blocks; those of absent tokens are zeros.

    If `causal`, the scores of a slot follow from what comes up to the first token of its block, and those that it gives
    to its own and to later blocks mean nothing.
    """

    def __init__(self, heads: int, key: int, *, causal: bool) -> None:
        super().__init__()
        for name, value in (("heads", heads), ("key", key)):
            if value < 1:
                raise ValueError(f"{type(self).__name__}: {name} ({value}) must be at least 1")
        self.causal = causal

    @abstractmethod
    def forward(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None = None
    ) -> Float[Tensor, "n h b b"]: ...

    def describe(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None
    ) -> Float[Tensor, "n h b i"]:
        """What a block is known by: its mean key; if causal, the mean of all keys so far, and its first key."""
        if not self.causal:
            return block_means(k, present)
        first = k[:, :, :, 0]
        # the own block is left out, not taken away again: rounding would tell of its later tokens
        earlier = F.pad(k[:, :, :-1].sum(3).cumsum(2), (0, 0, 1, 0))
        before = torch.arange(k.shape[2], device=k.device)[:, None] * k.shape[3]
        return torch.cat([(earlier + first) / (before + 1), first], dim=-1)


@final
class MLPSorting(SortingNetwork):
    """W2 relu(W1 x + b1), each head with its own, for up to `blocks` blocks (section 3.2, equation 2).

    x is a mean where the paper has a sum, so that it does not grow with the block. W2 has no bias: added to a column,
    a number is scaled away. Raises ValueError for more blocks.
    """

    def __init__(self, heads: int, key: int, blocks: int, *, causal: bool, ff_dim: int | None = None) -> None:
        super().__init__(heads, key, causal=causal)
        if blocks < 1:
            raise ValueError(f"MLPSorting: blocks ({blocks}) must be at least 1")
        width, ff_dim = key * (2 if causal else 1), 2 * key if ff_dim is None else ff_dim
        self.up, self.shift = _matrices(heads, width, ff_dim), nn.Parameter(torch.zeros(heads, 1, ff_dim))
        self.down = _matrices(heads, ff_dim, blocks)

    def forward(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None = None
    ) -> Float[Tensor, "n h b b"]:
        blocks, most = k.shape[2], self.down.shape[2]
        if blocks > most:
            raise ValueError(f"{blocks} blocks are more than this sorting network allows: it was built for {most}")
        hidden = (self.describe(k, present) @ self.up.to(k.dtype) + self.shift.to(k.dtype)).relu()
        return hidden @ self.down[:, :, :blocks].to(k.dtype)


@final
class BilinearSorting(SortingNetwork):
    """Scaled products of what a slot and what a block is known by, each projected; for any number of blocks.

    A variant of released packages; theirs use queries and keys, these keys alone, which are kept while writing.
    """

    def __init__(self, heads: int, key: int, *, causal: bool) -> None:
        super().__init__(heads, key, causal=causal)
        self.slot, self.block = _matrices(heads, key * (2 if causal else 1), key), _matrices(heads, key, key)

    def forward(
        self, k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None = None
    ) -> Float[Tensor, "n h b b"]:
        slots = self.describe(k, present) @ self.slot.to(k.dtype)
        blocks = block_means(k, present) @ self.block.to(k.dtype)
        return slots @ blocks.mT / math.sqrt(k.shape[-1])


def block_means(k: Float[Tensor, "n h b c e"], present: Bool[Tensor, "n b c"] | None) -> Float[Tensor, "n h b e"]:
    """The mean key of each block; zeros where it has none."""
    if present is None:
        return k.mean(3)
    return k.sum(3) / present.sum(-1).clamp(min=1)[:, None, :, None].to(k.dtype)


def _matrices(heads: int, rows: int, columns: int) -> nn.Parameter:
    """A matrix for each head, Glorot's uniform initialisation."""
    weight = torch.empty(heads, rows, columns)
    for one in weight:
        nn.init.xavier_uniform_(one)
    return nn.Parameter(weight)
