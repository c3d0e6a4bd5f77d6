"""Softmax attention to previous keys, multiplied by a ramp that falls to 0 beyond a head's span.

Heads attend to different numbers of keys. Heads of similar spans are computed together, along a band of as many
diagonals: keys outside it have no weight and are never read. Memory and time are linear in length and in the spans.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.ops import band as bands
from manyformer.ops.band import DiagonalBand
from manyformer.ops.softmax_attention import masked_softmax
from manyformer.position import Position
from manyformer.position.position import signed_distances
from manyformer.torch_internals import autocast_disabled

BAND_ROUNDING = 32
"""Spans are rounded up to a multiple of this; heads of equal rounded spans share a band."""


class HeadSpans(NamedTuple):
    """Span lengths in keys, length of the ramp behind them in keys, and the scale of the scores."""

    lengths: Float[Tensor, "#b h #l"]
    slope: int
    scale: float

    def ramp_weight(self, distances: Float[Tensor, "*p w"]) -> Float[Tensor, "*q w"]:
        """The factor of keys at these distances: 1 within the span, falling to 0 along the ramp."""
        return ((self.slope + self.lengths[..., None] - distances) / self.slope).clamp(0, 1)


def span_attention_reference(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    heads: HeadSpans,
    visible: Bool[Tensor, "#b #h l s"],
    *,
    position: Position,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h l s"]]:
    """The definition: outputs and weights m e^s / sum m e^s with ramp m; `visible` is the mask of previous keys."""
    logits = position.score(q @ k.mT * heads.scale, q, k, query_positions, key_positions)
    ramp = heads.ramp_weight(-signed_distances(query_positions, key_positions)[:, None].to(heads.lengths.dtype))
    # clamped: the gradient of log(0) is nan even where it is masked
    logits = logits + ramp.clamp(min=torch.finfo(ramp.dtype).tiny).log()
    weights = masked_softmax(logits, visible & (ramp > 0)).to(v.dtype)
    return weights @ v, weights


class SpanRows(NamedTuple):
    """Alignment of queries and keys: query i is at the position of key `offset` + i.

    `query_segments` and `key_segments` are segment ids, None where all tokens are of one document.
    """

    offset: int
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None


def span_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    heads: HeadSpans,
    vectors: Float[Tensor, "#h r e"] | None,
    max_spans: Sequence[int],
    rows: SpanRows,
) -> Float[Tensor, "b h l f"]:
    """`span_attention_reference` for contiguous positions, where head h attends to at most `max_spans[h]` keys.

    `vectors` are added to keys by distance, already scaled; the last row is for distance 1.
    """
    groups: dict[int, list[int]] = {}
    for head, max_span in enumerate(max_spans):
        groups.setdefault(-(-max_span // BAND_ROUNDING), []).append(head)
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    parts = []
    for group in groups.values():
        width = max(1, min(max(max_spans[head] for head in group), rows.offset + q.shape[2] - 1))
        # a slice of all heads is a view, a list of heads copies
        head_index = slice(None) if len(groups) == 1 else group
        distances = torch.arange(width, 0, -1, device=q.device, dtype=heads.lengths.dtype)
        share = heads._replace(lengths=heads.lengths[:, head_index]).ramp_weight(distances)
        table = vectors
        if vectors is not None:
            table = vectors[head_index if len(vectors) > 1 else slice(None), -width:].to(compute_dtype)
        inputs = (x[:, head_index].to(compute_dtype) for x in (q, k, v))
        parts.append(_SpanAttention.apply(*inputs, share.to(compute_dtype), table, rows, heads.scale))  # type: ignore[no-untyped-call]
    if len(parts) > 1:
        order = torch.tensor([head for group in groups.values() for head in group], device=q.device)
        parts = [torch.cat(parts, 1)[:, order.argsort()]]
    y: Tensor = parts[0].to(v.dtype)
    return y


class _SpanAttention(torch.autograd.Function):
    """Attention of one group of heads; `ramp` are the factors by distance, (#b, h, #l, w)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ramp: Tensor, table: Tensor | None, rows: SpanRows, scale: float
    ) -> Tensor:
        width = ramp.shape[-1]
        band = DiagonalBand(rows.offset - width, width, q.shape[2], k.shape[2])
        with autocast_disabled(q.device):
            scores = bands.band_products(q * scale, k, band)
            if table is not None:
                scores = scores + q @ table.mT
            scores = scores.masked_fill(_hidden_keys(rows, band, q.device) | (ramp <= 0), -torch.inf)
            # keys with ramp 0 are hidden: -inf either way
            lse = (scores + ramp.log()).logsumexp(-1, keepdim=True)
            unramped = scores.sub_(lse.masked_fill_(lse == -torch.inf, 0.0)).exp_()
            y = bands.band_weighted_sum(unramped * ramp, v, band)
        ctx.save_for_backward(q, k, v, ramp, table, unramped, y)
        ctx.band = band
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        q, k, v, ramp, table, unramped, y = ctx.saved_tensors
        band = ctx.band
        scale = ctx.scale
        with autocast_disabled(q.device):
            delta = (grad_y * y).sum(-1, keepdim=True)
            # gradient of each key's ramp factor; times that factor, the gradient of its score
            grad_ramp = unramped * (bands.band_products(grad_y, v, band) - delta)
            grad_scores = grad_ramp * ramp
            weights = unramped * ramp
            grad_q = bands.band_weighted_sum(grad_scores, k, band) * scale
            grad_table = None
            if table is not None:
                grad_q = grad_q + grad_scores @ table
                grad_table = torch.einsum("bhlr,bhle->hre", grad_scores, q).sum_to_size(table.shape)
            grad_k = bands.band_weighted_sum_transposed(grad_scores, q * scale, band)
            grad_v = bands.band_weighted_sum_transposed(weights, grad_y, band)
        return grad_q, grad_k, grad_v, grad_ramp.sum_to_size(ramp.shape), grad_table, None, None


def _hidden_keys(rows: SpanRows, band: DiagonalBand, device: torch.device) -> Bool[Tensor, "*b l w"]:
    """Mask of the band's keys that do not exist or belong to another document."""
    missing = ~band.valid_keys(device)
    if rows.query_segments is None or rows.key_segments is None:
        return missing
    key = band.key_index(device).clamp(0, band.num_keys - 1)
    other_document = rows.key_segments[:, key] != rows.query_segments[:, :, None]
    return (missing | other_document)[:, None]
