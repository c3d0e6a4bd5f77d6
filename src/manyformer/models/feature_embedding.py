"""The input of models of graphs: a projection of each node's features, dense or sparse."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.dropout import Dropout
from manyformer.errors import UserError
from manyformer.ops.sparse_features import sparse_product


@final
class FeatureEmbedding(nn.Module):
    """A projection of `features` numbers of each node to `dim` channels, with dropout of these numbers.

    Sparse features are the values of a few columns of each node: time and memory are then linear in these values, and
    dropout draws random numbers for them alone, which is the same since a zero stays a zero. Raises UserError for
    features of another width."""

    def __init__(self, features: int, dim: int, *, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.features = features
        self.dim = dim
        self.dropout = Dropout(dropout)
        self.weight = nn.Parameter(torch.empty(features, dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        nn.init.xavier_uniform_(self.weight)

    def forward(
        self, values: Float[Tensor, "b l k"], columns: Int[Tensor, "b l k"] | None = None
    ) -> Float[Tensor, "b l d"]:
        """The projection of dense features (b, l, features), or of `values` in these columns of each node."""
        rows, length, width = values.shape
        if columns is None and width != self.features:
            raise UserError(f"a node has {width} features, but this model was built with features={self.features}")
        values = self.dropout(values.to(self.weight.dtype))
        if columns is None:
            y = values @ self.weight
        else:
            check_columns(columns, self.features)
            flat_columns = columns.reshape(-1, width)
            flat_values = values.reshape(-1, width)
            y = sparse_product(flat_values, flat_columns, self.weight)
            y = y.view(rows, length, self.dim)
        if self.bias is None:
            return y
        return y + self.bias


def check_columns(columns: Int[Tensor, "b l k"], features: int) -> None:
    """Raise UserError for a column that is none of the features; on other devices than a CPU torch itself does."""
    if columns.device.type != "cpu" or not columns.numel():
        return
    lowest = int(columns.min())
    highest = int(columns.max())
    if lowest < 0 or highest >= features:
        raise UserError(
            f"the columns of sparse features are {lowest} to {highest}, but this model was built with "
            f"features={features}"
        )
