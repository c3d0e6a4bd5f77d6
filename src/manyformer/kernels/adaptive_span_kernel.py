"""Adaptive-span attention: each head learns how many preceding keys it attends to."""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import (
    PADDING_SEGMENT,
    AlignedLayout,
    ContiguousLayout,
    LayerOutput,
    PackedLayout,
    TokenPositions,
    no_watch,
)
from manyformer.kernels.attention_spans import AttentionSpans
from manyformer.kernels.kernel import Kernel, KernelCall
from manyformer.masks import Window
from manyformer.ops import span_attention as ops
from manyformer.ops.span_attention import HeadSpans, SpanRows
from manyformer.position import Position

MAX_REFERENCE_QUERIES = 16
"""At most this many queries of adaptive spans use the reference computation: a block of the band is larger."""


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
        if (rows := self._span_rows(call)) is None:
            y, weights = ops.span_attention_reference(
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
        return LayerOutput(ops.span_attention(q, k, v, head_spans, vectors, reach, rows), state, loss)

    def explain(self, call: KernelCall) -> str:
        if self._span_rows(call) is None:
            return "naive: all cached keys, for few queries or where the tokens of a document are not contiguous"
        reach = self.spans.reach(self.spans(call.q[..., call.q.shape[-1] - self.extra_query_dim :]))
        return f"banded: only the keys within the span of each head, {', '.join(map(str, reach))}"

    def _span_rows(self, call: KernelCall) -> SpanRows | None:
        """The offset of queries against keys where a band can be computed: both contiguous, and enough queries."""
        if call.watch is not no_watch or call.q.shape[2] <= MAX_REFERENCE_QUERIES:
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
        return terms.keys[:, :-1]

    def _mean_span(self, lengths: Float[Tensor, "#b h #l"], query_positions: TokenPositions) -> Tensor:
        if not self.extra_query_dim:
            return lengths.mean()
        valid = (query_positions.segment_ids != PADDING_SEGMENT).expand(lengths.shape[0], -1)[:, None]
        return torch.where(valid, lengths, 0.0).sum() / (valid.sum() * lengths.shape[1]).clamp(min=1)


def named_span_kernels(module: nn.Module) -> dict[str, AdaptiveSpanKernel]:
    """The kernels with learned spans within a module by their names."""
    return {name: part for name, part in module.named_modules() if isinstance(part, AdaptiveSpanKernel)}
