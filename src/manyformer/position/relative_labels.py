"""Relative positions as labels of pairs: clipped distances, and whether a summary and a token share a part."""

from typing import Literal, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyformer.core import SUMMARY_ROLE, TokenPositions
from manyformer.head_selection import PerHeadTensors
from manyformer.position.distance_terms import signed_distances
from manyformer.position.position import Keys, PairScores, Position, Queries


@final
class RelativeLabelPosition(Position, PerHeadTensors):
    """A learned vector and bias per pair label, added to keys and scores (Ainslie et al. 2020, arXiv:2004.08483).

    Their section on relative position encoding: e_ij = (q_i (k_j + keys[r]) + bias[r]) / sqrt(e), as released; nothing
    is added to values. Labels r of two tokens of a text, or of two summaries, are their distance clipped to `clip` on
    either side. A summary and a token have one label, or with `cross_labels=2` one label if they belong to the same
    part and another if they do not. Each head has its own table. Released models also have labels for tokens of
    different documents, which do not attend to each other here.
    """

    head_axes = (("keys", -3), ("bias", -2))

    def __init__(self, width: int, heads: int, clip: int = 12, *, cross_labels: Literal[1, 2] = 2) -> None:
        super().__init__()
        if clip < 1:
            raise ValueError(
                f"RelativeLabelPosition: clip ({clip}) must be at least 1; all larger distances share a label"
            )
        self.clip = clip
        self.cross_labels = cross_labels
        label_count = 2 * clip + 1 + cross_labels
        self.keys = nn.Parameter(torch.empty(heads, label_count, width))
        self.bias = nn.Parameter(torch.zeros(heads, label_count))
        # the released standard deviation; products with a query then have the query's scale
        nn.init.trunc_normal_(self.keys, std=0.5, a=-1.0, b=1.0)

    def pair_labels(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Int[Tensor, "b l s"]:
        """The label of each pair."""
        distance_labels = signed_distances(query_positions, key_positions).clamp(-self.clip, self.clip) + self.clip
        if query_positions.roles is None or key_positions.roles is None:
            return distance_labels
        is_summary = query_positions.roles == SUMMARY_ROLE, key_positions.roles == SUMMARY_ROLE
        is_cross_pair = is_summary[0][:, :, None] != is_summary[1][:, None, :]
        cross_label = torch.full((), 2 * self.clip + 1, device=distance_labels.device)
        if self.cross_labels == 2 and query_positions.part_ids is not None and key_positions.part_ids is not None:
            query_parts = query_positions.part_ids[:, :, None]
            key_parts = key_positions.part_ids[:, None, :]
            cross_label = cross_label + ((query_parts != key_parts) | (query_parts < 0))
        return torch.where(is_cross_pair, cross_label, distance_labels)

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        label_scores: Tensor = (q @ self.keys.mT + self.bias[:, None]) * q.shape[-1] ** -0.5
        labels = self.pair_labels(query_positions, key_positions)[:, None]
        return logits + label_scores.gather(-1, labels.expand(*label_scores.shape[:-1], -1))

    def extra_repr(self) -> str:
        return f"{len(self.bias)} heads, clip={self.clip}, {self.cross_labels} for a summary and a token"
