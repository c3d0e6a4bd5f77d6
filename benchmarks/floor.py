"""What attention costs at the very least: a model whose attention only adds, and bare products of matrices beside it.

No softmax, no maximum, no mask, nothing gathered or merged, every product from memory that is there already: a goal
below this floor asks for faster products than torch's, whatever is done about attention.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from frame import Step
from torch import Tensor

from manyformer.nn import Kernel, KernelCall
from manyformer.nn.core import LayerOutput
from manyformer.nn.softmax.sparse_plan import SparsePlan


class Product(NamedTuple):
    """`count` products of matrices m x k and k x n."""

    count: int
    m: int
    k: int
    n: int


class Adding(Kernel):
    """The least that projections of queries, keys and values can be for: their sum."""

    supports = frozenset({"embed"})

    def forward(self, call: KernelCall) -> LayerOutput:
        return LayerOutput(call.q + call.k + call.v)

    def explain(self, *_: object) -> str:
        return "the sum of queries, keys and values"


def floor(step: Step, products: Iterable[Product], layers: int) -> Step:
    """The step of a model without attention, and after it the products of so many layers, forward and backward."""
    jobs: dict[Product, Callable[[], Tensor]] = {}
    order = [jobs.setdefault(product, _job(product)) for product in products] * layers

    def both() -> None:
        step()
        for job in order:
            job()

    return both


def _job(product: Product) -> Callable[[], Tensor]:
    count, m, k, n = product
    left, right, result = torch.randn(count, m, k), torch.randn(count, k, n), torch.empty(count, m, n)
    return lambda: torch.bmm(left, right, out=result)


def planned(plan: SparsePlan, channels: int) -> list[Product]:
    """Those of attention over a plan: scores and outputs; the gradients of weights, queries, keys and values."""
    products = []
    for lane in plan.rows[0]:
        for part in lane.parts:
            for tiles in part.tiles:
                rows, queries, keys = len(tiles.rows), part.q.size, tiles.columns.shape[1] * part.k.size
                if tiles.same_keys:
                    rows, queries = 1, rows * queries
                to_keys, to_queries = (queries, channels, keys), (queries, keys, channels)
                sizes_of_products = [
                    to_keys,
                    to_queries,
                    to_keys,
                    to_queries,
                    (keys, queries, channels),
                    (keys, queries, channels),
                ]
                products += [Product(rows, *sizes) for sizes in sizes_of_products for _ in lane.heads]
    return products


def estimated(heads: int, length: int, channels: int, features: int, chunk: int) -> list[Product]:
    """Those of causal linear attention in chunks over random features, with a column for the sum of the weights."""
    count, wide = heads * length // chunk, channels + 1
    feature_products = [Product(1, heads * length, channels, features), Product(1, heads * length, features, channels)]
    # the sums of chunks, reading from them, and the gradients of both
    memory_update, output = Product(count, features, chunk, wide), Product(count, chunk, features, wide)
    value_gradient = Product(count, chunk, wide, features)
    pairs, values = Product(count, chunk, features, chunk), Product(count, chunk, chunk, wide)
    pair_gradient, value_pairs = Product(count, chunk, chunk, features), Product(count, chunk, wide, chunk)
    # queries and keys; forward: sums, reading, pairs, outputs; backward: the gradient of each factor
    return [
        *feature_products,
        *feature_products,
        memory_update,
        output,
        pairs,
        values,
        memory_update,
        value_pairs,
        pair_gradient,
        value_gradient,
        pair_gradient,
        value_gradient,
        values,
        output,
    ]
