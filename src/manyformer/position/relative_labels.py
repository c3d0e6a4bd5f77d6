"""Relative positions as labels of pairs: distances, and whether a summary and a token belong together."""

from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import SUMMARY_ROLE, TokenPositions
from manyformer.position.distance_terms import distance
from manyformer.position.position import Position


@final
class RelativeLabelPosition(Position):
    """A vector and a number for each label, added to keys and scores (Ainslie et al. 2020, arXiv:2004.08483).

    Their section on relative position encoding: e_ij = (q_i (k_j + keys[r]) + bias[r]) / sqrt(e), as released; nothing
    is added to values. Labels r of two tokens of a text, or of two summaries, are their distance clipped to `clip` on
    either side. A summary and a token have one label, or with `across=2` one where they belong to the same part and
    another where they do not. Each head has its own table. Released models have labels for tokens of different
    documents as well, which see nothing of each other here.
    """

    def __init__(self, width: int, heads: int, clip: int = 12, *, across: Literal[1, 2] = 2) -> None:
        super().__init__()
        if clip < 1:
            raise ValueError(
                f"RelativeLabelPosition: clip ({clip}) must be at least 1; beyond it all distances are alike"
            )
        self.clip, self.across = clip, across
        rows = 2 * clip + 1 + across
        self.keys = nn.Parameter(torch.empty(heads, rows, width))
        self.bias = nn.Parameter(torch.zeros(heads, rows))
        # the released deviation; products with a query then are of the size of its own
        nn.init.trunc_normal_(self.keys, std=0.5, a=-1.0, b=1.0)

    def row(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Int[Tensor, "b l s"]:
        """The label of each pair."""
        near = distance(query_positions, key_positions).clamp(-self.clip, self.clip) + self.clip
        if query_positions.roles is None or key_positions.roles is None:
            return near
        crossing = (query_positions.roles == SUMMARY_ROLE)[:, :, None] != (key_positions.roles == SUMMARY_ROLE)[
            :, None, :
        ]
        label = torch.full((), 2 * self.clip + 1, device=near.device)
        if self.across == 2 and query_positions.part_ids is not None and key_positions.part_ids is not None:
            mine, other = query_positions.part_ids[:, :, None], key_positions.part_ids[:, None, :]
            label = label + ((mine != other) | (mine < 0))
        return torch.where(crossing, label, near)

    def score(
        self,
        logits: Float[Tensor, "b h l s"],
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        each: Tensor = (q @ self.keys.mT + self.bias[:, None]) * q.shape[-1] ** -0.5
        rows = self.row(query_positions, key_positions)[:, None]
        return logits + each.gather(-1, rows.expand(*each.shape[:-1], -1))

    def extra_repr(self) -> str:
        return f"{len(self.bias)} heads, clip={self.clip}, {self.across} for a summary and a token"
