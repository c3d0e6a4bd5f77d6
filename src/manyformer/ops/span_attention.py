"""Softmax attention to the keys before each query, weighed by a ramp that ends where a head's span does.

Heads see different numbers of keys. Those with about as many are computed together, along a band of as many diagonals:
the keys beyond it have no weight and are never touched. Memory and time are linear in length and in the spans.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.autocast import autocast_disabled
from manyformer.core import TokenPositions
from manyformer.ops import band as bands
from manyformer.ops.band import DiagonalBand
from manyformer.ops.softmax_attention import weights_of
from manyformer.position import Position
from manyformer.position.distance_terms import distance

TOGETHER = 32
"""Heads whose spans differ by no more than about this are computed with the same band."""


class HeadSpans(NamedTuple):
    """How long the spans are, in keys, how many more the ramp behind them has, and what scores are multiplied by."""

    lengths: Float[Tensor, "#b h #l"]
    slope: int
    scale: float

    def share(self, away: Float[Tensor, "*p w"]) -> Float[Tensor, "*q w"]:
        """What keys so far behind count: 1 within the span, falling to 0 along the ramp."""
        return ((self.slope + self.lengths[..., None] - away) / self.slope).clamp(0, 1)


def naive(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    heads: HeadSpans,
    seen: Bool[Tensor, "#b #h l s"],
    *,
    position: Position,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h l s"]]:
    """Outputs and weights m e^s / sum m e^s, written out; `seen` says which keys are before which queries at all."""
    logits = position.score(q @ k.mT * heads.scale, q, k, query_positions, key_positions)
    share = heads.share(-distance(query_positions, key_positions)[:, None].to(heads.lengths.dtype))
    # no logarithm of zero: its gradient is no number, even where nothing comes of it
    logits = logits + share.clamp(min=torch.finfo(share.dtype).tiny).log()
    weights = weights_of(logits, seen & (share > 0)).to(v.dtype)
    return weights @ v, weights


class SpanRows(NamedTuple):
    """How queries lie against keys: query i is at the place of key `offset` + i. `query_positions` and `key_positions`
    number documents.
    """

    offset: int
    at: Tensor | None = None
    of: Tensor | None = None


def attend(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    heads: HeadSpans,
    vectors: Float[Tensor, "#h r e"] | None,
    reach: Sequence[int],
    rows: SpanRows,
) -> Float[Tensor, "b h l f"]:
    """The same for tokens that stand side by side, where head h sees at most `reach[h]` keys.

    `vectors` are added to keys by distance, already scaled, the last row at distance 1.
    """
    groups: dict[int, list[int]] = {}
    for head, far in enumerate(reach):
        groups.setdefault(-(-far // TOGETHER), []).append(head)
    wide = torch.promote_types(q.dtype, torch.float32)
    parts = []
    for mine in groups.values():
        width = max(1, min(max(reach[head] for head in mine), rows.offset + q.shape[2] - 1))
        # all heads are a view, some are a copy
        some = slice(None) if len(groups) == 1 else mine
        away = torch.arange(width, 0, -1, device=q.device, dtype=heads.lengths.dtype)
        share = heads._replace(lengths=heads.lengths[:, some]).share(away)
        table = None if vectors is None else vectors[some if len(vectors) > 1 else slice(None), -width:].to(wide)
        given = (x[:, some].to(wide) for x in (q, k, v))
        parts.append(_Spanned.apply(*given, share.to(wide), table, rows, heads.scale))  # type: ignore[no-untyped-call]
    if len(parts) > 1:
        order = torch.tensor([head for mine in groups.values() for head in mine], device=q.device)
        parts = [torch.cat(parts, 1)[:, order.argsort()]]
    y: Tensor = parts[0].to(v.dtype)
    return y


class _Spanned(torch.autograd.Function):
    """One group of heads; `share` are the ramp's weights by distance, (#b, h, #l, w)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: Tensor, table: Tensor | None, rows: SpanRows, scale: float
    ) -> Tensor:
        width = share.shape[-1]
        band = DiagonalBand(rows.offset - width, width, q.shape[2], k.shape[2])
        with autocast_disabled(q.device):
            scores = bands.band_products(q * scale, k, band)
            if table is not None:
                scores = scores + q @ table.mT
            scores = scores.masked_fill(_hidden(rows, band, q.device) | (share <= 0), -torch.inf)
            # a share of zero is hidden: minus infinity either way
            lse = (scores + share.log()).logsumexp(-1, keepdim=True)
            whole = scores.sub_(lse.masked_fill_(lse == -torch.inf, 0.0)).exp_()
            y = bands.band_weighted_sum(whole * share, v, band)
        ctx.save_for_backward(q, k, v, share, table, whole, y)
        ctx.band, ctx.scale = band, scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> Any:
        q, k, v, share, table, whole, y = ctx.saved_tensors
        band, scale = ctx.band, ctx.scale
        with autocast_disabled(q.device):
            slope = (up * y).sum(-1, keepdim=True)
            # what flows into the ramp's weight of each key; times that weight, what flows into its score
            to_share = whole * (bands.band_products(up, v, band) - slope)
            change, weights = to_share * share, whole * share
            to_q, to_table = bands.band_weighted_sum(change, k, band) * scale, None
            if table is not None:
                to_q = to_q + change @ table
                to_table = torch.einsum("bhlr,bhle->hre", change, q).sum_to_size(table.shape)
            to_k = bands.band_weighted_sum_transposed(change, q * scale, band)
            to_v = bands.band_weighted_sum_transposed(weights, up, band)
        return to_q, to_k, to_v, to_share.sum_to_size(share.shape), to_table, None, None


def _hidden(rows: SpanRows, band: DiagonalBand, device: torch.device) -> Bool[Tensor, "*b l w"]:
    """Which keys of the band there are not, or not of the query's document."""
    gone = ~band.exists(device)
    if rows.at is None or rows.of is None:
        return gone
    key = torch.arange(band.queries, device=device)[:, None] + torch.arange(band.width, device=device) + band.first
    other = rows.of[:, key.clamp(0, band.keys - 1)] != rows.at[:, :, None]
    return (gone | other)[:, None]
