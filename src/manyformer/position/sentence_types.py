"""Sentence types: a learned vector for each of the texts of a row."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.position.position import Position
from manyformer.training_hooks import OptionalOnLoad


@final
class SentenceTypePosition(Position, OptionalOnLoad):
    """Adds the vector of a token's sentence to its embedding (Devlin et al. 2019, section 3, "segment embeddings").

    The sentence is the part of the document, `part_ids`; the parts from `types` - 1 on have the last vector, and every
    token has the first one where no parts are given. Vectors are drawn from N(0, `std`^2)."""

    def __init__(self, dim: int, types: int, *, std: float) -> None:
        super().__init__()
        self.types = types
        self.weight = nn.Parameter(torch.randn(types, dim) * std)

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if positions.part_ids is None:
            return x + self.weight[0]
        return x + nn.functional.embedding(positions.part_ids.clamp(0, self.types - 1), self.weight)
