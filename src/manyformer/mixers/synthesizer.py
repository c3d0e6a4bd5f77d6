"""Attention whose weights need not compare tokens."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.attention import split_heads
from manyformer.core import Context, Layer, Out, Place, State
from manyformer.masks import Everything, Mask
from manyformer.mixers.scores import Scores
from manyformer.mixers.spatial_gate import visible, weigh
from manyformer.ops.softmax import weights_of
from manyformer.sources import Own
from manyformer.sources.base import Shape


@final
class Synthesizer(Layer):
    """softmax(scores) v with `scores` from elsewhere than products of queries and keys (Tay et al. 2021, section 3).

    Several scores are mixed, their shares learned and adding up to 1 (section 3.4). Values, heads and the projection
    of the outputs are those of attention. All positions count within each document. Raises ValueError where the
    scores disagree on the number of heads, and for positions beyond theirs.
    """

    def __init__(self, dim: int, scores: Sequence[Scores], *, mask: Mask | None = None) -> None:
        super().__init__()
        self.heads = scores[0].heads
        if any(part.heads != self.heads for part in scores):
            raise ValueError(f"all scores must have the same heads, and these have {[part.heads for part in scores]}")
        if dim % self.heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({self.heads})")
        self.mask = Everything() if mask is None else mask
        self.scores = nn.ModuleList(scores)
        self.shares = nn.Parameter(torch.zeros(len(scores))) if len(scores) > 1 else None
        self.widths = [part.width for part in scores]
        self.to_v, self.out, self.source = nn.Linear(dim, dim), nn.Linear(dim, dim), Own()
        for layer in (self.to_v, self.out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def start(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        shape = Shape(self.heads, sum(self.widths), self.to_v.out_features // self.heads)
        return self.source.start(batch, shape, folds=False, capacity=capacity, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        keys = self.source(x, ctx, self._project, state, folds=False)
        mask = visible(self.mask, ctx.place, keys.place, self.heads)
        weights = weights_of(self._scores(x, keys.k, ctx.place, keys.place), mask)
        ctx.watch(self, "weights", weights)
        y = weigh(weights.to(keys.v.dtype), keys.v).transpose(1, 2).flatten(2)
        return Out(self.out(y), keys.state, keys.loss)

    def extra_repr(self) -> str:
        return repr(self.mask)

    def _scores(self, x: Tensor, k: Tensor, at: Place, of: Place) -> Float[Tensor, "#b h l s"]:
        parts = zip(self.scores, torch.split(k, self.widths, dim=-1))
        found: list[Tensor] = [part(x, kept, at, of) for part, kept in parts]
        if self.shares is None:
            return found[0]
        mixed: list[Tensor] = [share * one for share, one in zip(self.shares.softmax(0), found)]
        return sum(mixed[1:], mixed[0])

    def _project(self, x: Float[Tensor, "b s d"], place: Place) -> tuple[Tensor, Tensor]:
        k = torch.cat([part.key(x) for part in self.scores], dim=-1)  # type: ignore[operator]
        return k, split_heads(self.to_v(x), self.heads)
