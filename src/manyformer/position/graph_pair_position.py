"""Scores of pairs of nodes that a model of graphs computes once for all layers."""

from typing import final

import torch
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.head_selection import PerHeadTensors
from manyformer.position.position import Keys, PairScores, Position, Queries


@final
class GraphPairPosition(Position, PerHeadTensors):
    """Adds `TokenPositions.pair_scores` to the scaled scores; ValueError if the model computed none."""

    head_axes = (("head_numbers", -1),)

    def __init__(self, heads: int) -> None:
        super().__init__()
        # the heads that remain where some are removed
        self.register_buffer("head_numbers", torch.arange(heads), persistent=False)
        self.head_numbers: Tensor

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        if query_positions.pair_scores is None:
            raise ValueError("this layer needs the scores of pairs of nodes, which GraphormerEncoding computes")
        return logits + query_positions.pair_scores.index_select(2, self.head_numbers).transpose(1, 2)
