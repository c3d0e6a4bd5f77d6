"""Adaptive-span attention: weights of previous keys are multiplied by a ramp that falls to 0 beyond the span of a head.

Spans are fixed, learned for each head, or computed for each token. Heads of similar spans are computed together, along
a band of as many diagonals: keys outside it have no weight and are never read. Memory and time are linear in length and
in the spans.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.nn.core import (
    PADDING_SEGMENT,
    AlignedLayout,
    ContiguousLayout,
    LayerOutput,
    PackedLayout,
    TokenPositions,
    no_watch,
)
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.masks.local import Window
from manyformer.nn.ops.softmax_attention import masked_softmax
from manyformer.nn.positions.position import Position, signed_distances
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient, hides_values
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.torch_internals import autocast_disabled
from manyformer.nn.runtime.training_hooks import OwnOptimizerEpsilon, PostStepUpdate
from manyformer.nn.softmax.band import DiagonalBand, band_products, band_weighted_sum, band_weighted_sum_transposed

MAX_REFERENCE_QUERIES = 16
"""At most this many queries of adaptive spans use the reference computation: a block of the band is larger."""

BAND_ROUNDING = 32
"""Spans are rounded up to a multiple of this; heads of equal rounded spans share a band."""


class AttentionSpans(PerHeadTensors, ABC):
    """Span lengths z of heads, from 0 to `max_span`, each followed by a ramp over `ramp` more keys.

    Sukhbaatar et al. 2019 (arXiv:1905.07799), section 2. `query_dim` is the number of extra query channels per token
    and head that the spans are computed from.
    """

    query_dim: int = 0

    def __init__(self, heads: int, max_span: int, *, ramp: int) -> None:
        super().__init__()
        if max_span < 1 or ramp < 2:
            raise ValueError(
                f"{type(self).__name__}: max_span ({max_span}) must be at least 1 and ramp ({ramp}) at least 2: "
                "with a shorter ramp a span of 0 sees no key and gets no gradient"
            )
        self.heads = heads
        self.max_span = max_span
        self.ramp = ramp

    @abstractmethod
    def forward(self, span_queries: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        """Compute the span lengths; the last axis is 1 unless they differ between queries."""

    @abstractmethod
    def max_reach(self) -> int:
        """The largest number of preceding keys that any query of any head can see with the current parameters."""

    def reach(self, lengths: Float[Tensor, "#b h #l"]) -> list[int]:
        """The largest number of keys that each head sees, i.e. keys whose ramp weight is above 0."""
        max_lengths: list[float] = lengths.detach().amax((0, 2)).tolist()
        # at the distance length + ramp the weight is exactly 0
        return [min(self.max_span, math.ceil(length + self.ramp) - 1) for length in max_lengths]

    def extra_repr(self) -> str:
        return f"{self.heads} heads, up to {self.max_span}, ramp={self.ramp}"


@final
class FixedAttentionSpans(AttentionSpans):
    """Spans of all heads fixed to `max_span`."""

    def __init__(self, heads: int, max_span: int, *, ramp: int = 32) -> None:
        super().__init__(heads, max_span, ramp=ramp)

    def forward(self, span_queries: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        dtype = torch.promote_types(span_queries.dtype, torch.float32)
        return span_queries.new_full((1, self.heads, 1), float(self.max_span), dtype=dtype)

    def max_reach(self) -> int:
        return self.max_span


@final
class LearnedAttentionSpans(AttentionSpans, PostStepUpdate, OwnOptimizerEpsilon):
    """One learned span for each head, stored as a share of `max_span` that is initialized to `initial_share`.

    The share is clipped to [0, 1] after each step, and again where it is used, because averaged or loaded weights may
    lie outside. Its gradient comes only from keys on the ramp: a span cannot grow towards keys beyond it, so start
    with the required span or with a long ramp. Adam normalizes the size of gradients away, so the smallest span loss
    would pull all spans to 0; `OwnOptimizerEpsilon` keeps steps proportional to the gradient.
    """

    head_axes = (("share", -1),)

    def __init__(self, heads: int, max_span: int, *, ramp: int = 32, initial_share: float = 0.0) -> None:
        super().__init__(heads, max_span, ramp=ramp)
        if not 0 <= initial_share <= 1:
            raise ValueError(
                f"LearnedAttentionSpans: initial_share ({initial_share}) must be a share of max_span, from 0 to 1"
            )
        self.share = nn.Parameter(torch.full((heads,), float(initial_share)))

    def after_step(self, step: int) -> None:
        self.share.clamp_(0, 1)

    def forward(self, span_queries: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        return (self.share.clamp(0, 1) * self.max_span)[None, :, None]

    def max_reach(self) -> int:
        return max(self.reach(self.share.clamp(0, 1)[None, :, None] * self.max_span))


@final
class DynamicAttentionSpans(AttentionSpans):
    """One span for each token and head: `max_span` sigmoid(v.x + b) (section 2, "dynamic attention span").

    The weights v are part of the attention's query projection; b is initialized so that the sigmoid of b alone is
    `initial_share`.
    """

    query_dim = 1
    head_axes = (("bias", -2),)

    def __init__(self, heads: int, max_span: int, *, ramp: int = 32, initial_share: float = 0.5) -> None:
        super().__init__(heads, max_span, ramp=ramp)
        if not 0 < initial_share < 1:
            limits = "must be above 0 and below 1, the range of a sigmoid"
            raise ValueError(f"DynamicAttentionSpans: initial_share ({initial_share}) {limits}")
        self.bias = nn.Parameter(torch.full((heads, 1), math.log(initial_share / (1 - initial_share))))

    def forward(self, span_queries: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        return self.max_span * torch.sigmoid(span_queries[..., 0] + self.bias)

    def max_reach(self) -> int:
        return self.max_span


class HeadSpans(NamedTuple):
    """Span lengths in keys, length of the ramp behind them in keys, and the scale of the scores."""

    lengths: Float[Tensor, "#b h #l"]
    slope: int
    scale: float

    def ramp_weight(self, distances: Float[Tensor, "*p w"]) -> Float[Tensor, "*q w"]:
        """The factor of keys at these distances: 1 within the span, falling to 0 along the ramp."""
        return ((self.slope + self.lengths[..., None] - distances) / self.slope).clamp(0, 1)


class SpanRows(NamedTuple):
    """Alignment of queries and keys: query i is at the position of key `offset` + i.

    `query_segments` and `key_segments` are segment ids, None where all tokens are of one document.
    """

    offset: int
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None


@final
class AdaptiveSpanKernel(Kernel):
    """Softmax attention to the keys before each query, within the span of each head (Sukhbaatar et al. 2019).

    Section 2: weights are m e^s / sum m e^s with m = clip((ramp + z - x) / ramp, 0, 1) for the key x tokens back; a
    token does not attend to itself, and the authors' code counts x from 0. Keys beyond the ramp of every head are not
    computed, and heads with shorter spans compute less. The loss is `span_loss` times the mean span over heads, and
    over tokens for dynamic spans. The first token of a document sees no key and gets zeros. The watcher receives the
    span lengths, (#b, h, #l), as "spans". The position may add vectors to keys by distance.
    """

    supports = frozenset({"query", "key", "score"})
    # the number of computed pairs depends on the spans
    content_based = True

    def __init__(self, spans: AttentionSpans, *, span_loss: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        if span_loss < 0:
            raise ValueError(f"AdaptiveSpanKernel: span_loss ({span_loss}) must be at least 0")
        self.spans = spans
        self.span_loss = span_loss
        self.scale = scale
        self.extra_query_dim = spans.query_dim
        # all preceding keys, without the token itself
        self.cache_mask = self.mask = Window(spans.max_span + 1) & ~Window(1)

    def forward(self, call: KernelCall) -> LayerOutput:
        state = call.state
        watch = call.watch
        q, span_queries = torch.split(call.q, [call.q.shape[-1] - self.extra_query_dim, self.extra_query_dim], -1)
        lengths = self.spans(span_queries)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (call.k, call.v))
        watch(self, "spans", lengths)
        loss = self.span_loss * self._mean_span(lengths, call.query_positions) if self.span_loss else 0.0
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        head_spans = HeadSpans(lengths, self.spans.ramp, scale)
        # also watched calls: only all pairs have weights to report
        if (rows := self._span_rows(call)) is None:
            y, weights = span_attention_reference(
                q,
                k,
                v,
                head_spans,
                self.mask.dense(call.query_positions, call.key_positions, q.shape[1]),
                position=call.position,
                query_positions=call.query_positions,
                key_positions=call.key_positions,
            )
            watch(self, "weights", weights)
            return LayerOutput(y, state, loss)
        reach = self.spans.reach(lengths)
        vectors = self._distance_vectors(call.position, max(reach))
        return LayerOutput(span_attention(q, k, v, head_spans, vectors, reach, rows), state, loss)

    def explain(self, call: KernelCall) -> str:
        if self._span_rows(call) is None:
            return "naive: all cached keys, for few queries or where the tokens of a document are not contiguous"
        reach = self.spans.reach(self.spans(call.q[..., call.q.shape[-1] - self.extra_query_dim :]))
        return f"banded: only the keys within the span of each head, {', '.join(map(str, reach))}"

    def _span_rows(self, call: KernelCall) -> SpanRows | None:
        """The offset of queries against keys where a band can be computed: both contiguous, and enough queries."""
        if call.watch is not no_watch or call.q.shape[2] <= MAX_REFERENCE_QUERIES or hides_values():
            return None
        terms = call.position.distance_terms(1, 0)
        has_vectors_alone = terms is not None and terms.keys is not None and terms.bias is None
        if "score" in call.position.required_seams() and not has_vectors_alone:
            return None
        query_layout = call.query_positions.layout
        key_layout = call.key_positions.layout
        segments = call.query_positions.segment_ids, call.key_positions.segment_ids
        if isinstance(query_layout, ContiguousLayout) and isinstance(key_layout, ContiguousLayout):
            return SpanRows(query_layout.start - key_layout.start)
        if isinstance(query_layout, AlignedLayout) and isinstance(key_layout, AlignedLayout):
            return SpanRows(query_layout.start - key_layout.start, *segments)
        if isinstance(query_layout, PackedLayout) and query_layout == key_layout:
            return SpanRows(0, *segments)
        return None

    def _distance_vectors(self, position: Position, max_reach: int) -> Float[Tensor, "#h r e"] | None:
        """The vectors that the position adds to keys at the distances `max_reach`, ..., 1."""
        if "score" not in position.required_seams():
            return None
        terms = position.distance_terms(max_reach, 0)
        assert terms is not None
        assert terms.keys is not None
        assert terms.query_bias is None
        # the last row is distance 0, the token itself, which it does not attend to
        return terms.keys[:, :-1]

    def _mean_span(self, lengths: Float[Tensor, "#b h #l"], query_positions: TokenPositions) -> Tensor:
        if not self.extra_query_dim:
            return lengths.mean()
        valid = (query_positions.segment_ids != PADDING_SEGMENT).expand(lengths.shape[0], -1)[:, None]
        return torch.where(valid, lengths, 0.0).sum() / (valid.sum() * lengths.shape[1]).clamp(min=1)


def named_span_kernels(module: nn.Module) -> dict[str, AdaptiveSpanKernel]:
    """The kernels with learned spans within a module by their names."""
    return {name: part for name, part in module.named_modules() if isinstance(part, AdaptiveSpanKernel)}


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
    # heads of similar spans share a band: one call each would cost more than a few keys too many
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
        parts.append(_SpanAttention.call(*inputs, share.to(compute_dtype), table, rows, heads.scale))
    if len(parts) > 1:
        order = torch.tensor([head for group in groups.values() for head in group], device=q.device)
        parts = [torch.cat(parts, 1)[:, order.argsort()]]
    y: Tensor = parts[0].to(v.dtype)
    return y


class _SpanAttention(HandwrittenGradient):
    """Attention of one group of heads; `ramp` are the factors by distance, (#b, h, #l, w)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ramp: Tensor, table: Tensor | None, rows: SpanRows, scale: float
    ) -> Tensor:
        width = ramp.shape[-1]
        band = DiagonalBand(rows.offset - width, width, q.shape[2], k.shape[2])
        with autocast_disabled(q.device):
            scores = band_products(q * scale, k, band)
            if table is not None:
                scores = scores + q @ table.mT
            scores = scores.masked_fill(_hidden_keys(rows, band, q.device) | (ramp <= 0), -torch.inf)
            # keys with ramp 0 are hidden: -inf either way
            lse = (scores + ramp.log()).logsumexp(-1, keepdim=True)
            # e^s / sum m e^s: kept without the ramp, whose gradient it is
            unramped = scores.sub_(lse.masked_fill_(lse == -torch.inf, 0.0)).exp_()
            y = band_weighted_sum(unramped * ramp, v, band)
        ctx.save_for_backward(q, k, v, ramp, table, unramped, y)
        ctx.band = band
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        q, k, v, ramp, table, unramped, y = ctx.saved_tensors
        band = ctx.band
        scale = ctx.scale
        with autocast_disabled(q.device):
            delta = (grad_y * y).sum(-1, keepdim=True)
            # gradient of each key's ramp factor; times that factor, the gradient of its score
            grad_ramp = unramped * (band_products(grad_y, v, band) - delta)
            grad_scores = grad_ramp * ramp
            weights = unramped * ramp
            grad_q = band_weighted_sum(grad_scores, k, band) * scale
            grad_table = None
            if table is not None:
                grad_q = grad_q + grad_scores @ table
                grad_table = torch.einsum("bhlr,bhle->hre", grad_scores, q).sum_to_size(table.shape)
            grad_k = band_weighted_sum_transposed(grad_scores, q * scale, band)
            grad_v = band_weighted_sum_transposed(weights, grad_y, band)
        return grad_q, grad_k, grad_v, grad_ramp.sum_to_size(ramp.shape), grad_table, None, None

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        q, k, v, ramp, table, rows, scale = arguments
        width = ramp.shape[-1]
        band = DiagonalBand(rows.offset - width, width, q.shape[2], k.shape[2])
        with autocast_disabled(q.device):
            scores = band_products(q * scale, k, band)
            if table is not None:
                scores = scores + q @ table.mT
            hidden = _hidden_keys(rows, band, q.device) | (ramp <= 0)
            # clamped: the gradient of log(0) is nan even where it is masked
            scores = (scores + ramp.clamp(min=torch.finfo(ramp.dtype).tiny).log()).masked_fill(hidden, -torch.inf)
            highest = scores.detach().amax(-1, keepdim=True)
            weights = (scores - highest.masked_fill(highest == -torch.inf, 0.0)).exp()
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
            return band_weighted_sum(weights, v, band)


def _hidden_keys(rows: SpanRows, band: DiagonalBand, device: torch.device) -> Bool[Tensor, "*b l w"]:
    """Mask of the band's keys that do not exist or belong to another document."""
    missing = ~band.valid_keys(device)
    if rows.query_segments is None or rows.key_segments is None:
        return missing
    key = band.key_index(device).clamp(0, band.num_keys - 1)
    other_document = rows.key_segments[:, key] != rows.query_segments[:, :, None]
    return (missing | other_document)[:, None]
