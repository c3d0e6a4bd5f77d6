"""Where the nearest keys come from: torch, or a library of its own for it."""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.errors import UserError
from manyformer.ops.top_products import TopProducts, top_products


class KeySearch(ABC):
    """Finds the keys with the largest products with each query."""

    name: str

    @abstractmethod
    def __call__(
        self, q: Float[Tensor, "p l e"], k: Float[Tensor, "p s e"], count: int, hidden: Bool[Tensor, "l s"] | None
    ) -> TopProducts:
        """The `count` largest, or all where there are fewer; what is `hidden` has the product -inf."""


@final
class ExactSearch(KeySearch):
    """All products, in torch, on any device: see `manyformer.ops.top_products`."""

    name = "torch"

    def __call__(
        self, q: Float[Tensor, "p l e"], k: Float[Tensor, "p s e"], count: int, hidden: Bool[Tensor, "l s"] | None
    ) -> TopProducts:
        return top_products(q, k, count, hidden)


@final
class FaissSearch(KeySearch):
    """faiss's exhaustive search by inner product, in float32 on a CPU; it needs `pip install 'manyformer[knn]'`.

    An index would have to be built anew for memories that change with every segment. What is hidden key by key, as in
    rows with padding, faiss cannot tell: there torch searches. Raises UserError where faiss is missing.
    """

    name = "faiss"

    def __init__(self) -> None:
        try:
            import faiss
        except ImportError as error:
            raise UserError("search 'faiss' needs faiss: pip install 'manyformer[knn]'") from error
        self._faiss = faiss

    def __call__(
        self, q: Float[Tensor, "p l e"], k: Float[Tensor, "p s e"], count: int, hidden: Bool[Tensor, "l s"] | None
    ) -> TopProducts:
        if hidden is not None or not k.shape[1] or not q.shape[1]:
            return top_products(q, k, count, hidden)
        products, index = [], []
        for one, keys in zip(*(x.detach().float().cpu().contiguous().numpy() for x in (q, k))):
            found = self._faiss.knn(one, keys, min(count, len(keys)), metric=self._faiss.METRIC_INNER_PRODUCT)
            products.append(torch.from_numpy(found[0]))
            index.append(torch.from_numpy(found[1]))
        return TopProducts(torch.stack(products).to(q), torch.stack(index).to(q.device))
