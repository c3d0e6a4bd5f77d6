"""Positions of nodes from eigenvectors of the graph's Laplacian."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn


@final
class LaplacianEmbedding(nn.Module):
    """A projection of `count` eigenvectors, whose signs are drawn anew in training (Dwivedi and Bresson 2021, 2.1).

    An eigenvector and its negative are equally valid; each row of a batch has signs of its own."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.count = count
        self.projection = nn.Linear(count, dim)

    def forward(self, eigenvectors: Float[Tensor, "b l k"]) -> Float[Tensor, "b l d"]:
        eigenvectors = eigenvectors.to(self.projection.weight.dtype)
        if self.training:
            signs = torch.randint(2, (len(eigenvectors), 1, self.count), device=eigenvectors.device) * 2 - 1
            eigenvectors = eigenvectors * signs
        positions: Tensor = self.projection(eigenvectors)
        return positions
