"""Vectors that token ids stand for, for contracts and measurements of models whose input is no text."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

STAND_IN_IDS = 32
"""The number of different vectors that stand for token ids."""


@lru_cache(maxsize=64)
def stand_in_vectors(draw: Callable[..., Tensor], size: int, device: torch.device) -> nn.Embedding:
    """A vector for each token id, drawn by `draw(ids, size)`, the same in every process.

    An embedding, so that contracts can differentiate by its output."""
    generator = torch.Generator().manual_seed(STAND_IN_IDS)
    with torch.inference_mode(False):  # noqa: FBT003 - torch.compile takes no keyword
        table = draw(STAND_IN_IDS, size, generator=generator, device="cpu")
        return nn.Embedding(STAND_IN_IDS, size, _weight=table.to(device)).requires_grad_(requires_grad=False)
