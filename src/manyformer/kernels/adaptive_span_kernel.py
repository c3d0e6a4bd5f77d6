"""Attention whose heads learn how far to look back."""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import (
    PADDING_SEGMENT,
    AlignedLayout,
    ContiguousLayout,
    LayerOutput,
    PackedLayout,
    State,
    TokenPositions,
    WatchFn,
    no_watch,
)
from manyformer.kernels.attention_spans import AttentionSpans
from manyformer.kernels.kernel import Kernel
from manyformer.masks import Window
from manyformer.ops import span_attention as ops
from manyformer.ops.span_attention import HeadSpans, SpanRows
from manyformer.position import Position

FEW_QUERIES = 16
"""So few queries are written out: a block of a band would be larger."""


@final
class AdaptiveSpanKernel(Kernel):
    """Softmax attention to the keys before each query, within the span of each head (Sukhbaatar et al. 2019).

    Section 2: weights are m e^s / sum m e^s with m = clip((ramp + z - x) / ramp, 0, 1) for the key x tokens back, the
    token itself not among them; the authors' code counts x from 0. Keys beyond the ramp of every head are never
    computed, and heads with shorter spans compute less. The loss is `cost` times the mean span of the heads, and of the
    tokens where each has its own. The first token of a document sees no key and gets zeros. Watched, it reports as
    "spans" the lengths, (#b, h, #l). The position may add vectors to keys by distance.
    """

    supports = frozenset({"query", "key", "score"})
    # how much is computed depends on the spans
    content_based = True

    def __init__(self, spans: AttentionSpans, *, cost: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        if cost < 0:
            raise ValueError(f"AdaptiveSpanKernel: cost ({cost}) must be at least 0")
        self.spans, self.cost, self.scale = spans, cost, scale
        self.extra_query_dim = spans.query_dim
        # all keys before, but not the token itself
        self.cache_mask = self.mask = Window(spans.max_length + 1) & ~Window(1)

    def forward(
        self,
        q: Float[Tensor, "b h l n"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        q, asked = torch.split(q, [q.shape[-1] - self.extra_query_dim, self.extra_query_dim], -1)
        lengths = self.spans(asked)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        watch(self, "spans", lengths)
        loss = self.cost * self._mean(lengths, query_positions) if self.cost else 0.0
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        heads = HeadSpans(lengths, self.spans.ramp, scale)
        if (rows := self._rows(q, query_positions, key_positions, position, watch)) is None:
            y, weights = ops.naive(
                q,
                k,
                v,
                heads,
                self.mask.dense(query_positions, key_positions, q.shape[1]),
                position=position,
                query_positions=query_positions,
                key_positions=key_positions,
            )
            watch(self, "weights", weights)
            return LayerOutput(y, state, loss)
        reach = self.spans.reach(lengths)
        return LayerOutput(ops.attend(q, k, v, heads, self._vectors(position, max(reach)), reach, rows), state, loss)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> str:
        if self._rows(q, query_positions, key_positions, position, watch) is None:
            return "naive: all keys that are kept, for few queries or where tokens do not stand side by side"
        reach = self.spans.reach(self.spans(q[..., q.shape[-1] - self.extra_query_dim :]))
        return f"banded: no more keys than the heads see, {', '.join(map(str, reach))}"

    def _rows(
        self,
        q: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        watch: WatchFn,
    ) -> SpanRows | None:
        """How queries lie against keys, where both stand side by side and are worth a band."""
        if watch is not no_watch or q.shape[2] <= FEW_QUERIES:
            return None
        found = position.distance_terms(1, 0)
        if "score" in position.required_seams() and (found is None or found.keys is None or found.bias is not None):
            return None
        one, two = query_positions.layout, key_positions.layout
        if isinstance(one, ContiguousLayout) and isinstance(two, ContiguousLayout):
            return SpanRows(one.start - two.start)
        if isinstance(one, AlignedLayout) and isinstance(two, AlignedLayout):
            return SpanRows(one.start - two.start, query_positions.segment_ids, key_positions.segment_ids)
        packed = isinstance(one, PackedLayout) and one == two
        return SpanRows(0, query_positions.segment_ids, key_positions.segment_ids) if packed else None

    def _vectors(self, position: Position, far: int) -> Float[Tensor, "#h r e"] | None:
        """What the position adds to keys `far`, ..., 1 before their query."""
        if "score" not in position.required_seams():
            return None
        found = position.distance_terms(far, 0)
        assert found is not None
        assert found.keys is not None
        assert found.turn is None
        return found.keys[:, :-1]

    def _mean(self, lengths: Float[Tensor, "#b h #l"], query_positions: TokenPositions) -> Tensor:
        if not self.extra_query_dim:
            return lengths.mean()
        real = (query_positions.segment_ids != PADDING_SEGMENT).expand(lengths.shape[0], -1)[:, None]
        return torch.where(real, lengths, 0.0).sum() / (real.sum() * lengths.shape[1]).clamp(min=1)
