"""Search for the keys with the largest dot products: in torch or with faiss."""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.errors import UserError
from manyformer.ops.top_products import TopProducts, top_products


class KeySearch(ABC):
    """Finds the keys with the largest dot product for each query."""

    name: str

    @abstractmethod
    def __call__(
        self, q: Float[Tensor, "p l e"], k: Float[Tensor, "p s e"], count: int, masked: Bool[Tensor, "l s"] | None
    ) -> TopProducts:
        """Return the `count` largest products, or all if there are fewer; `masked` pairs have the product -inf."""


@final
class ExactSearch(KeySearch):
    """Computes all products in torch, on any device: see `manyformer.ops.top_products`."""

    name = "torch"

    def __call__(
        self, q: Float[Tensor, "p l e"], k: Float[Tensor, "p s e"], count: int, masked: Bool[Tensor, "l s"] | None
    ) -> TopProducts:
        return top_products(q, k, count, masked)


@final
class FaissSearch(KeySearch):
    """faiss's exhaustive search by inner product, in float32 on a CPU; it needs `pip install 'manyformer[knn]'`.

    It builds no index, because the memory changes with every segment. faiss cannot mask single keys, as rows with
    padding need; those calls are computed in torch. Raises UserError if faiss is not installed.
    """

    name = "faiss"

    def __init__(self) -> None:
        try:
            import faiss
        except ImportError as error:
            raise UserError("search 'faiss' needs faiss: pip install 'manyformer[knn]'") from error
        self._faiss = faiss

    def __call__(
        self, q: Float[Tensor, "p l e"], k: Float[Tensor, "p s e"], count: int, masked: Bool[Tensor, "l s"] | None
    ) -> TopProducts:
        if masked is not None or not k.shape[1] or not q.shape[1]:
            return top_products(q, k, count, masked)
        products = []
        columns = []
        for queries, keys in zip(*(x.detach().float().cpu().contiguous().numpy() for x in (q, k))):
            nearest = self._faiss.knn(queries, keys, min(count, len(keys)), metric=self._faiss.METRIC_INNER_PRODUCT)
            products.append(torch.from_numpy(nearest[0]))
            columns.append(torch.from_numpy(nearest[1]))
        return TopProducts(torch.stack(products).to(q), torch.stack(columns).to(q.device))
