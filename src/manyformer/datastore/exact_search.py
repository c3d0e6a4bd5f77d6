"""Exact nearest-neighbour search by squared distance, in blocks of keys."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from manyformer.ops.top_products import top_products as largest

KeyArray = NDArray[np.float16] | NDArray[np.float32]
"""Keys (n, width) in memory or mapped from a file."""

KEYS_PER_BLOCK = 1 << 15
"""The number of keys per block of the search."""

VALUES_PER_BLOCK = 1 << 22
"""The number of key values per block when distances are computed."""


class Neighbours(NamedTuple):
    """The nearest entries of each query in ascending distance; missing ones are entry -1 at an infinite distance."""

    distances: Float[Tensor, "n k"]
    entries: Int[Tensor, "n k"]


class ExcludedRanges(NamedTuple):
    """For each query r half-open ranges of entries, `starts` to `stops`, that are excluded from its neighbours."""

    starts: Int[Tensor, "n r"]
    stops: Int[Tensor, "n r"]

    def contain(self, entries: Int[Tensor, "#n m"]) -> Bool[Tensor, "n m"]:
        """Which entries are excluded for each query."""
        excluded = torch.zeros(len(self.starts), entries.shape[1], dtype=torch.bool, device=entries.device)
        for start, stop in zip(*(bounds.to(entries.device).T[..., None] for bounds in self)):
            excluded |= (entries >= start) & (entries < stop)
        return excluded


def nearest_entries(
    keys: KeyArray, queries: Float[Tensor, "n d"], k: int, *, excluded: ExcludedRanges | None = None
) -> Int[Tensor, "n k"]:
    """The `k` entries of `keys` at the least squared distance from each query; -1 if there are fewer.

    Ties are broken arbitrarily. |q - k|^2 is minimal where q.k - |k|^2 / 2 is maximal, which is a dot product of
    vectors with one more channel.
    """
    augmented_queries = torch.cat([queries, torch.ones_like(queries[:, :1])], 1)[None]
    best_products = queries.new_full((len(queries), 0), -torch.inf)
    entries = torch.full_like(best_products, -1, dtype=torch.long)
    for start in range(0, len(keys), KEYS_PER_BLOCK):
        block = _to_tensor(keys[start : start + KEYS_PER_BLOCK], queries)
        augmented_keys = torch.cat([block, (block * block).sum(1, keepdim=True) / -2], 1)
        mask = None
        if excluded is not None:
            mask = excluded.contain(torch.arange(start, start + len(block), device=queries.device)[None])
        (products,), (index,) = largest(augmented_queries, augmented_keys[None], k, mask)
        candidates = torch.cat([best_products, products], 1)
        best_products, order = candidates.topk(min(k, candidates.shape[1]))
        entries = torch.cat([entries, index + start], 1).gather(1, order)
    entries = torch.where(best_products > -torch.inf, entries, -1)
    return F.pad(entries, (0, k - entries.shape[1]), value=-1)


def with_distances(keys: KeyArray, queries: Float[Tensor, "n d"], entries: Int[Tensor, "n k"]) -> Neighbours:
    """The entries with their exact squared distances, sorted by distance and then by entry.

    Distances are recomputed from the keys because a search may have rounded them or compared quantized keys.
    """
    count, k = entries.shape
    distances = queries.new_empty(count, k)
    rows = max(1, VALUES_PER_BLOCK // (k * queries.shape[1]))
    for start in range(0, count, rows):
        query_block = queries[start : start + rows]
        entry_block = entries[start : start + rows]
        key_block = _to_tensor(keys[entry_block.clamp(min=0).cpu().numpy()], queries)
        distances[start : start + rows] = (query_block[:, None] - key_block).square().sum(-1)
    distances = distances.masked_fill(entries < 0, torch.inf)
    # sorted by entry first, so that the order of equal distances is determined
    entries, order = entries.sort(dim=1)
    distances, stable_order = distances.gather(1, order).sort(stable=True, dim=1)
    return Neighbours(distances, entries.gather(1, stable_order))


def _to_tensor(keys: KeyArray, like: Tensor) -> Tensor:
    """A copy of some keys on the device and in the dtype of `like`."""
    return torch.from_numpy(np.array(keys)).to(like.device).to(like.dtype)
