"""Relative positions as labels of pairs: distances, and whether a summary and a token belong together."""

from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import SUMMARY, Place
from manyformer.position.base import Position
from manyformer.position.distance import distance


@final
class Labels(Position):
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
            raise ValueError(f"Labels: clip ({clip}) must be at least 1; beyond it all distances are alike")
        self.clip, self.across = clip, across
        rows = 2 * clip + 1 + across
        self.keys = nn.Parameter(torch.empty(heads, rows, width))
        self.bias = nn.Parameter(torch.zeros(heads, rows))
        # the released deviation; products with a query then are of the size of its own
        nn.init.trunc_normal_(self.keys, std=0.5, a=-1.0, b=1.0)

    def row(self, at: Place, of: Place) -> Int[Tensor, "b l s"]:
        """The label of each pair."""
        near = distance(at, of).clamp(-self.clip, self.clip) + self.clip
        if at.role is None or of.role is None:
            return near
        crossing = (at.role == SUMMARY)[:, :, None] != (of.role == SUMMARY)[:, None, :]
        label = torch.full((), 2 * self.clip + 1, device=near.device)
        if self.across == 2 and at.part is not None and of.part is not None:
            mine, other = at.part[:, :, None], of.part[:, None, :]
            label = label + ((mine != other) | (mine < 0))
        return torch.where(crossing, label, near)

    def score(
        self,
        logits: Float[Tensor, "b h l s"],
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        at: Place,
        of: Place,
    ) -> Float[Tensor, "b h l s"]:
        each: Tensor = (q @ self.keys.mT + self.bias[:, None]) * q.shape[-1] ** -0.5
        rows = self.row(at, of)[:, None]
        return logits + each.gather(-1, rows.expand(*each.shape[:-1], -1))

    def extra_repr(self) -> str:
        return f"{len(self.bias)} heads, clip={self.clip}, {self.across} for a summary and a token"
