"""The keys with the largest products with each query, exactly, without all products being there at once.

Keys are parted into groups, and of each group only the largest product is looked at first. Whatever belongs to the k
largest products lies in one of the k groups whose largest are largest: every other group has k products at least as
large ahead of its own. So a second look at few keys finds them all.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

PRODUCTS_PER_BLOCK = {"cpu": 1 << 22}
"""Products that are held at once: on a CPU what stays in its last cache."""

PRODUCTS_PER_BLOCK_ELSEWHERE = 1 << 27
"""The same on other devices, which need much work at once."""

ROWS = 64
"""Queries in a block, where there are so many keys that more do not fit."""


class TopProducts(NamedTuple):
    """For each query its largest products, descending, and the columns of their keys; -inf where there are too few."""

    products: Float[Tensor, "p l n"]
    columns: Int[Tensor, "p l n"]


def naive(
    q: Float[Tensor, "p l e"], k: Float[Tensor, "p s e"], count: int, hidden: Bool[Tensor, "l s"] | None = None
) -> TopProducts:
    """The definition: all products, and torch's own selection of the `count` largest."""
    products = q @ k.mT
    if hidden is not None:
        products = products.masked_fill(hidden, -torch.inf)
    return TopProducts(*products.topk(min(count, k.shape[1]), -1))


@torch.no_grad()
def top_products(
    q: Float[Tensor, "p l e"], k: Float[Tensor, "p s e"], count: int, hidden: Bool[Tensor, "l s"] | None = None
) -> TopProducts:
    """The `count` keys with the largest products for each query, or all where there are fewer.

    What is `hidden` has the product -inf. Of equal products any may be chosen.
    """
    (pairs, queries, _), keys = q.shape, k.shape[1]
    count = min(count, keys)
    found = TopProducts(q.new_empty(pairs, queries, count), q.new_empty(pairs, queries, count, dtype=torch.long))
    if not found.columns.numel():
        return found
    limit = PRODUCTS_PER_BLOCK.get(q.device.type, PRODUCTS_PER_BLOCK_ELSEWHERE)
    width = min(keys, max(count, limit // min(queries, ROWS)))
    rows = min(queries, max(1, limit // width))
    block = min(pairs, max(1, limit // (rows * width)))
    room = q.new_empty(block * rows * width)
    for pair in range(0, pairs, block):
        for row in range(0, queries, rows):
            here = slice(pair, pair + block), slice(row, row + rows)
            best = _best(q[here], k[here[0]], count, None if hidden is None else hidden[here[1]], width, room)
            found.products[here], found.columns[here] = best
    return found


def _best(
    q: Float[Tensor, "p c e"],
    k: Float[Tensor, "p s e"],
    count: int,
    hidden: Bool[Tensor, "c s"] | None,
    width: int,
    room: Float[Tensor, " r"],
) -> tuple[Tensor, Tensor]:
    """The best of a block of queries: those of `width` keys after the other, and of what was best until then."""
    products, index = [], []
    for begin, end in _steps(k.shape[1], width):
        all_here = room[: q.shape[0] * q.shape[1] * (end - begin)].view(q.shape[0], q.shape[1], end - begin)
        torch.bmm(q, k[:, begin:end].mT, out=all_here)
        if hidden is not None:
            all_here.masked_fill_(hidden[:, begin:end], -torch.inf)
        some, numbers = _candidates(all_here, min(count, end - begin))
        products.append(some)
        index.append(numbers + begin)
    # more than one stretch of keys has its own best; they are few
    best, chosen = torch.cat(products, -1).topk(count, -1)
    return best, torch.cat(index, -1).gather(-1, chosen)


def _steps(keys: int, width: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + width, keys)) for begin in range(0, keys, width))


def _candidates(products: Float[Tensor, "p c s"], count: int) -> tuple[Tensor, Tensor]:
    """Few of the products, the `count` largest among them, and their numbers."""
    keys = products.shape[-1]
    size = 1 << max(0, round(math.log2(keys / count) / 2))
    groups = keys // size
    if size < 4 or groups < count:
        best = products.topk(count, -1, sorted=False)
        return best.values, best.indices
    # a group is every `groups`-th key, so that the largest is sought for side by side; what is left over is taken whole
    whole, rest = products[..., : groups * size], products[..., groups * size :]
    tops = whole.view(*whole.shape[:-1], size, groups).amax(-2).topk(count, -1, sorted=False).indices
    members = torch.arange(0, groups * size, groups, device=products.device)
    numbers = (tops[..., None, :] + members[:, None]).flatten(-2)
    after = torch.arange(groups * size, keys, device=products.device).expand(*numbers.shape[:-1], -1)
    return torch.cat([products.gather(-1, numbers), rest], -1), torch.cat([numbers, after], -1)
