"""The exact largest products of each query with all keys, without holding all products at once.

Keys are split into groups, and only the maximum of each group is compared first. The k largest products lie in the k
groups with the largest maxima: for every other group there are k products at least as large as its own. So a second
pass over few keys finds them all.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.nn.runtime.handwritten_gradient import hides_values

PRODUCTS_PER_BLOCK = {"cpu": 1 << 22}
"""Products of a search that exist at once on a CPU: as many as fit its last-level cache."""

PRODUCTS_PER_BLOCK_ELSEWHERE = 1 << 27
"""Products that exist at once on other devices, which need more parallel work."""

ROWS = 64
"""Queries per block where the keys are too many for larger blocks."""


class TopProducts(NamedTuple):
    """The largest products of each query, descending, and the indices of their keys; -inf where there are too few."""

    products: Float[Tensor, "p l n"]
    columns: Int[Tensor, "p l n"]


def top_products_reference(
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

    `hidden` pairs have the product -inf. Of equal products any may be chosen.
    """
    pairs, queries, _ = q.shape
    keys = k.shape[1]
    count = min(count, keys)
    result = TopProducts(q.new_empty(pairs, queries, count), q.new_empty(pairs, queries, count, dtype=torch.long))
    if not result.columns.numel():
        return result
    if hides_values():
        return top_products_reference(q, k, count, hidden)
    limit = PRODUCTS_PER_BLOCK.get(q.device.type, PRODUCTS_PER_BLOCK_ELSEWHERE)
    # many keys at a time first, then as many queries as fit beside them
    width = min(keys, max(count, limit // min(queries, ROWS)))
    rows = min(queries, max(1, limit // width))
    block = min(pairs, max(1, limit // (rows * width)))
    scratch = q.new_empty(block * rows * width)
    for pair in range(0, pairs, block):
        for row in range(0, queries, rows):
            index = slice(pair, pair + block), slice(row, row + rows)
            masked = None if hidden is None else hidden[index[1]]
            best = _best_of_block(q[index], k[index[0]], count, masked, width, scratch)
            result.products[index], result.columns[index] = best
    return result


def _best_of_block(
    q: Float[Tensor, "p c e"],
    k: Float[Tensor, "p s e"],
    count: int,
    hidden: Bool[Tensor, "c s"] | None,
    width: int,
    scratch: Float[Tensor, " r"],
) -> tuple[Tensor, Tensor]:
    """The largest products of a block of queries, from the candidates of every `width` keys."""
    products = []
    index = []
    for begin in range(0, k.shape[1], width):
        end = min(begin + width, k.shape[1])
        block_products = scratch[: q.shape[0] * q.shape[1] * (end - begin)].view(q.shape[0], q.shape[1], end - begin)
        torch.bmm(q, k[:, begin:end].mT, out=block_products)
        if hidden is not None:
            block_products.masked_fill_(hidden[:, begin:end], -torch.inf)
        candidates, columns = _candidates(block_products, min(count, end - begin))
        products.append(candidates)
        index.append(columns + begin)
    # every range of keys has its own candidates; they are few
    best, chosen = torch.cat(products, -1).topk(count, -1)
    return best, torch.cat(index, -1).gather(-1, chosen)


def _candidates(products: Float[Tensor, "p c s"], count: int) -> tuple[Tensor, Tensor]:
    """A small superset of the `count` largest products, and their key indices."""
    keys = products.shape[-1]
    # groups of about sqrt(keys / count): then finding the best groups and looking into them cost about the same
    size = 1 << max(0, round(math.log2(keys / count) / 2))
    groups = keys // size
    if size < 4 or groups < count:
        best = products.topk(count, -1, sorted=False)
        return best.values, best.indices
    # a group is every `groups`-th key, so that maxima are vectorized; leftover keys are all candidates
    grouped = products[..., : groups * size]
    leftover = products[..., groups * size :]
    # each of the `count` largest is in a group whose maximum is at least as large: `count` groups hold all of them
    tops = grouped.view(*grouped.shape[:-1], size, groups).amax(-2).topk(count, -1, sorted=False).indices
    members = torch.arange(0, groups * size, groups, device=products.device)
    columns = (tops[..., None, :] + members[:, None]).flatten(-2)
    leftover_columns = torch.arange(groups * size, keys, device=products.device).expand(*columns.shape[:-1], -1)
    return torch.cat([products.gather(-1, columns), leftover], -1), torch.cat([columns, leftover_columns], -1)
