"""Adaptive attention span: a language model whose heads each learn the length of the context they attend to."""

from typing import Annotated, Literal

from manyformer.models import LanguageModel, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.kv_cache import KVSource, SegmentMemorySource, SpanCacheSource
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.positions import KeyDistancePosition
from manyformer.nn.softmax.adaptive_span_kernel import (
    AdaptiveSpanKernel,
    AttentionSpans,
    DynamicAttentionSpans,
    FixedAttentionSpans,
    LearnedAttentionSpans,
)
from manyformer.recipes.parts.baselines import NormOrder, check_heads, language_model
from manyformer.recipes.parts.keywords import MemoryLengthOrNone, PositiveSize
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Adaptive attention span",
    paper="Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers, arXiv:1905.07799",
    summary="Each head learns the length of the context it attends to, and computes no further.",
    task=LANGUAGE_MODELLING,
    family="sparse",
    constant_state=True,
    cost="O(l z d + l d^2) per layer, z the mean span of its heads plus the ramp",
    reasons={
        "attention_dropout": "soft spans change the weights of softmax",
        "convex_weights": "soft spans multiply weights after the softmax",
        "one_graph": "spans decide the shapes",
    },
    tiny_keywords={"max_span": 24, "span_ramp": 8, "span_init": 0.3},
)
def adaptive_span(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    max_span: Annotated[PositiveSize, "maximum attention span of a head, in tokens"] = 8192,
    span_ramp: Annotated[PositiveSize, "number of keys beyond a span over which attention decreases to zero"] = 32,
    span_init: Annotated[
        float | None,
        "initial span, as a fraction of max_span; null means 0, or 0.5 if it is computed for each token",
    ] = None,
    span_loss: Annotated[float, "weight in the loss of the mean span, in tokens"] = 2e-6,
    span_kind: Annotated[
        Literal["learned", "dynamic", "fixed"],
        "one learned span for each head, a span computed for each token, or max_span for all",
    ] = "learned",
    memory_length: MemoryLengthOrNone = None,
    dropout: float = 0.3,
    norm_order: NormOrder = "post",
) -> LanguageModel:
    """The 12-layer character model by default; `ff_dim` is 4 dim unless given.

    Section 2 and table 1. Positions are a vector for each distance, one table for all layers. `span_loss` multiplies
    the mean span of each layer, in tokens, summed over layers. With a `memory_length` of at least `max_span` and data
    with `packing: contiguous` the model trains on segments after a cache, as the authors do: 512 tokens after up to
    8192, with `optim.name=adagrad` and its defaults. Without, text longer than the span must be given in one row."""
    check_heads(dim, heads)
    # one table for all layers
    position = KeyDistancePosition(dim // heads, max_span)

    def make_spans() -> AttentionSpans:
        if span_kind == "fixed":
            return FixedAttentionSpans(heads, max_span, ramp=span_ramp)
        share = {} if span_init is None else {"initial_share": span_init}
        span_class = LearnedAttentionSpans if span_kind == "learned" else DynamicAttentionSpans
        return span_class(heads, max_span, ramp=span_ramp, **share)

    def make_source(spans: AttentionSpans) -> KVSource:
        # without segments a cache keeps what the longest span of the layer still reaches, and drops the rest
        if memory_length is None:
            return SpanCacheSource(spans)
        return SegmentMemorySource(memory_length, dim, reach=spans)

    def layer(number: int) -> dict[str, Layer]:
        # spans belong to a layer: its kernel ramps by them, and its cache is cut by them
        spans = make_spans()
        kernel = AdaptiveSpanKernel(spans, span_loss=span_loss)
        attention = Attention(dim, heads, kernel, position=position, source=make_source(spans), bias=False)
        return {"attention": attention, "ff": FeedForward(dim, ff_dim)}

    embed = TokenEmbedding(vocab, dim, scale=dim**0.5, dropout=dropout)
    # layers keep torch's initial matrices, as in the authors' code
    return language_model(embed, depth, layer, dropout=dropout, norm_order=norm_order, scaled_init=False)
