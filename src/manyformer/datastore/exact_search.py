"""The nearest keys by squared distance, exactly: a block of keys at a time, whatever their number."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from manyformer.ops.top_products import top_products as largest

KeyArray = NDArray[np.float16] | NDArray[np.float32]
"""Keys (n, width) in memory or mapped from a file."""

MOST = 1 << 15
"""Keys that are read at once."""

VALUES = 1 << 22
"""Numbers of keys that are held at once when distances are taken."""


class Neighbours(NamedTuple):
    """The nearest entries of each query, the nearest first; entry -1 at an infinite distance where there are fewer."""

    distances: Float[Tensor, "n k"]
    entries: Int[Tensor, "n k"]


class ExcludedRange(NamedTuple):
    """For each query a stretch of entries, from `begin` to before `end`, that do not count as its neighbours."""

    begin: Int[Tensor, " n"]
    end: Int[Tensor, " n"]

    def part(self, begin: int, end: int) -> "ExcludedRange":
        """The same for some of the queries."""
        return ExcludedRange(self.begin[begin:end], self.end[begin:end])


def nearest(
    keys: KeyArray, queries: Float[Tensor, "n d"], k: int, *, ban: ExcludedRange | None = None
) -> Int[Tensor, "n k"]:
    """The `k` entries of `keys` at the least squared distance from each query; -1 where there are fewer.

    Of equally near ones any may be chosen. |q - k|^2 is least where q.k - |k|^2 / 2 is largest, a product with one
    number more on either side.
    """
    asked = torch.cat([queries, torch.ones_like(queries[:, :1])], 1)[None]
    best = queries.new_full((len(queries), 0), -torch.inf)
    found = torch.full_like(best, -1, dtype=torch.long)
    for begin in range(0, len(keys), MOST):
        block = _tensor(keys[begin : begin + MOST], queries)
        longer = torch.cat([block, (block * block).sum(1, keepdim=True) / -2], 1)
        hidden = None
        if ban is not None:
            number = torch.arange(begin, begin + len(block), device=queries.device)
            hidden = (number >= ban.begin[:, None]) & (number < ban.end[:, None])
        (products,), (index,) = largest(asked, longer[None], k, hidden)
        best, order = torch.cat([best, products], 1).topk(min(k, best.shape[1] + products.shape[1]))
        found = torch.cat([found, index + begin], 1).gather(1, order)
    found = torch.where(best > -torch.inf, found, -1)
    return F.pad(found, (0, k - found.shape[1]), value=-1)


def measured(keys: KeyArray, queries: Float[Tensor, "n d"], entries: Int[Tensor, "n k"]) -> Neighbours:
    """These entries with their squared distances as the keys themselves tell them, in order of both.

    Whatever found them may have rounded, or have compared codes of keys.
    """
    count, k = entries.shape
    distances = queries.new_empty(count, k)
    rows = max(1, VALUES // (k * queries.shape[1]))
    for begin in range(0, count, rows):
        asked, chosen = queries[begin : begin + rows], entries[begin : begin + rows]
        there = _tensor(keys[chosen.clamp(min=0).cpu().numpy()], queries)
        distances[begin : begin + rows] = (asked[:, None] - there).square().sum(-1)
    distances = distances.masked_fill(entries < 0, torch.inf)
    # by number first, so that what is equally near has one order
    entries, order = entries.sort(dim=1)
    distances, again = distances.gather(1, order).sort(stable=True, dim=1)
    return Neighbours(distances, entries.gather(1, again))


def _tensor(part: KeyArray, like: Tensor) -> Tensor:
    """A copy of some keys where and as the queries are."""
    return torch.from_numpy(np.array(part)).to(like.device).to(like.dtype)
