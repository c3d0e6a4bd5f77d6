"""Positions of tokens for tests of parts that are given them."""

import torch

from manyformer.models.embedding import positions_of
from manyformer.nn.core import ContiguousLayout, TokenPositions


def range_positions(length: int, start: int = 0, *, plain: bool = True) -> TokenPositions:
    """One document from the position `start` on; without `plain` nothing is stated about it."""
    position_ids = torch.arange(start, start + length)[None]
    return TokenPositions(position_ids, torch.zeros_like(position_ids), ContiguousLayout(start) if plain else None)


def segment_positions(segments: list[list[int]]) -> TokenPositions:
    """Rows of documents by the segment of each token."""
    numbers = torch.tensor(segments)
    return positions_of(numbers.clamp(min=0), numbers, None)[0]
