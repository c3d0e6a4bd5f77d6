"""Attention that learns how far to look back: the ramp, its gradient, and keys beyond it that nobody touches."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.config import AdamConfig, AdamWConfig
from manyformer.models.embedding import positions_of
from manyformer.nn import Attention, KernelCall, SoftmaxKernel
from manyformer.nn.attention.kv_cache import SpanCacheSource
from manyformer.nn.attention.kv_cache.window_cache import RingCache
from manyformer.nn.batches import CausalLMBatch
from manyformer.nn.core import Context, TokenPositions, no_watch
from manyformer.nn.masks import Window
from manyformer.nn.positions import KeyDistancePosition, NoPosition, Position
from manyformer.nn.runtime.costs import count_flops
from manyformer.nn.runtime.training_hooks import run_post_step_updates
from manyformer.nn.softmax.adaptive_span_kernel import (
    AdaptiveSpanKernel,
    AttentionSpans,
    DynamicAttentionSpans,
    FixedAttentionSpans,
    LearnedAttentionSpans,
)
from manyformer.training.optimizers import make_optimizer

HEADS, WIDTH, LONGEST = 3, 4, 40
PACKED = torch.tensor([[0] * 50 + [1] * 20, [-1] * 9 + [0] * 61])


def place_of(segments: Tensor | None, rows: int = 2, length: int = 70) -> TokenPositions:
    return positions_of(torch.zeros(rows, length, dtype=torch.long), segments, None)[0]


def qkv(rows: int = 2, length: int = 70, more: int = 0) -> list[Tensor]:
    widths = (WIDTH + more, WIDTH, WIDTH)
    return [torch.randn(rows, HEADS, length, width, dtype=torch.float64, requires_grad=True) for width in widths]


def lengths_of(*shares: float) -> LearnedAttentionSpans:
    spans = LearnedAttentionSpans(HEADS, LONGEST, ramp=6).double()
    spans.share.data = torch.tensor(shares, dtype=torch.float64)
    return spans


def test_the_ramp_as_in_the_paper() -> None:
    """z = 0 and R = 4 give the keys 1, 2, 3 and 4 tokens back 3/4, 1/2, 1/4 and nothing of their weight."""
    kernel, (q, k, v) = (
        AdaptiveSpanKernel(LearnedAttentionSpans(1, 8, ramp=4)),
        [torch.zeros(1, 1, 6, 1) for _ in range(3)],
    )
    seen: dict[str, Tensor] = {}
    place = place_of(None, 1, 6)
    kernel(
        KernelCall(q, k, v, place, place, NoPosition(), None, lambda module, name, value: seen.update({name: value}))
    )
    torch.testing.assert_close(seen["weights"][0, 0, 5], torch.tensor([0, 0, 1, 2, 3, 0]) / 6)
    assert not seen["weights"][0, 0, 0].any()
    assert kernel.spans.reach(seen["spans"]) == [3]


@pytest.mark.parametrize("segments", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("position", [KeyDistancePosition(WIDTH, LONGEST), NoPosition()], ids=["distances", "none"])
@pytest.mark.parametrize(
    "spans",
    [lengths_of(0.0, 0.11, 0.9), DynamicAttentionSpans(HEADS, LONGEST, ramp=6, initial_share=0.2)],
    ids=["own", "dynamic"],
)
def test_cropped_is_uncropped(spans: AttentionSpans, position: Position, segments: Tensor | None) -> None:
    kernel, given, place = (
        AdaptiveSpanKernel(spans.double(), span_loss=0.5),
        qkv(more=spans.query_dim),
        place_of(segments),
    )
    position = position.double()
    weights = [*given, *spans.parameters(), *position.parameters()]
    one = kernel(KernelCall(*given, place, place, position))
    two = kernel(KernelCall(*given, place, place, position, None, lambda *_: None))
    assert kernel.explain(KernelCall(*given, place, place, position)).startswith("banded")
    real = (place.segment_ids != -1)[:, None, :, None]
    torch.testing.assert_close(one.y * real, two.y * real, atol=1e-10, rtol=1e-10)
    grad_output = torch.randn_like(one.y) * real
    grads = [torch.autograd.grad((out.y * grad_output).sum() + out.loss, weights) for out in (one, two)]
    for actual, expected in zip(*grads):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def test_the_gradient_of_a_span_by_differences() -> None:
    spans, (q, k, v), place = lengths_of(0.11, 0.41, 0.73), qkv(1, 24), place_of(None, 1, 24)
    kernel, weight = AdaptiveSpanKernel(spans), torch.randn(1, HEADS, 24, WIDTH, dtype=torch.float64)

    def loss(share: Tensor) -> Tensor:
        out = torch.func.functional_call(
            kernel, {"spans.share": share}, (KernelCall(q, k, v, place, place, NoPosition()),)
        )
        return (out.y * weight).sum()

    # no whole number of keys: there the ramp has a corner
    assert torch.autograd.gradcheck(loss, spans.share.detach().requires_grad_())


def test_the_longest_span_is_windowed_attention() -> None:
    given, place, position = qkv(), place_of(PACKED), KeyDistancePosition(WIDTH, LONGEST).double()
    window = SoftmaxKernel(Window(LONGEST + 1) & ~Window(1), path="naive")
    real = (place.segment_ids != -1)[:, None, :, None]
    expected = window(KernelCall(*given, place, place, position)).y * real
    for spans in (lengths_of(1.0, 1.0, 1.0), FixedAttentionSpans(HEADS, LONGEST).double()):
        actual = AdaptiveSpanKernel(spans)(KernelCall(*given, place, place, position)).y
        torch.testing.assert_close(actual * real, expected, atol=1e-10, rtol=1e-10)


def test_the_penalty_is_of_the_mean_span() -> None:
    spans, place = lengths_of(0.2, 0.5, 0.5), place_of(None, 1, 3)
    loss = AdaptiveSpanKernel(spans, span_loss=0.3)(KernelCall(*qkv(1, 3), place, place, NoPosition())).loss
    torch.testing.assert_close(loss, torch.tensor(0.3 * 0.4 * LONGEST, dtype=torch.float64))
    torch.testing.assert_close(torch.autograd.grad(loss, spans.share)[0], torch.full((3,), 0.1 * LONGEST).double())
    dynamic = DynamicAttentionSpans(HEADS, LONGEST).double()
    padded = place_of(torch.tensor([[0, 0, -1]]), 1, 3)
    q, k, v = qkv(1, 3, more=1)
    loss = AdaptiveSpanKernel(dynamic, span_loss=1.0)(KernelCall(q, k, v, padded, padded, NoPosition())).loss
    torch.testing.assert_close(loss, LONGEST * torch.sigmoid(q[:, :, :2, -1]).mean())


def test_time_follows_the_spans_of_each_head() -> None:
    place, (q, k, v) = place_of(None, 1, 512), qkv(1, 512)

    def cost(*shares: float) -> int:
        spans = LearnedAttentionSpans(HEADS, 400, ramp=8).double()
        spans.share.data = torch.tensor(shares, dtype=torch.float64)
        return count_flops(lambda: AdaptiveSpanKernel(spans)(KernelCall(q, k, v, place, place, NoPosition())))

    full, some, least = cost(1, 1, 1), cost(0.1, 0.1, 1), cost(0.1, 0.1, 0.1)
    # a block of 64 queries takes 63 keys more than it sees
    assert least < 0.25 * full
    assert some == pytest.approx((2 * least + full) / 3, rel=0.02)


def test_spans_are_clipped_and_follow_their_gradient() -> None:
    spans = lengths_of(-0.5, 0.5, 1.5)
    assert spans(torch.empty(1, HEADS, 1, 0))[0, :, 0].tolist() == [0.0, 20.0, 40.0]
    run_post_step_updates(spans, 1)
    assert spans.share.tolist() == [0.0, 0.5, 1.0]
    both = nn.ModuleList([spans, nn.Linear(2, 2, dtype=torch.float64)])
    for config in (AdamConfig(lr=1e-3), AdamWConfig(lr=1e-3)):
        optimiser = make_optimizer(both, config)
        assert sum(len(group["params"]) for group in optimiser.param_groups) == 3
        spans.share.data.fill_(0.5)
        for _ in range(30):
            # a hundredth of the gradient is a hundredth of the way
            spans.share.grad = torch.tensor([1e-5, 1e-3, 0.0], dtype=torch.float64)
            for group in optimiser.param_groups:
                group["lr"] = 3e-3
            optimiser.step()
        moved = 0.5 - spans.share.detach()
        assert moved[1] / moved[0] == pytest.approx(100, rel=0.05)
        assert moved[1] == pytest.approx(30 * 0.1 * 1e-3, rel=0.1)


def test_the_cache_is_as_long_as_the_spans() -> None:
    model = mf.build(
        "adaptive-span", vocab=9, dim=12, depth=2, heads=HEADS, max_span=LONGEST, span_ramp=6, dropout=0.0
    ).double()
    for layer, share in zip(model.body.children(), (0.1, 0.3)):
        layer.attention.inner.kernel.spans.share.data.fill_(share)
    tokens = torch.randint(9, (2, 60))
    expected, state = model(tokens).logits, model.init_state(2)
    actual = []
    for part in tokens.split([25, *[1] * 35], 1):
        logits, state, _ = model(part, None, state)
        actual.append(logits)
    torch.testing.assert_close(torch.cat(actual, 1), expected, atol=1e-10, rtol=1e-10)
    rings = [one.source for one, _ in state.body]
    assert [ring.k.shape[2] for ring in rings if isinstance(ring, RingCache)] == [10, 18]
    # spans that have grown see what is kept
    for layer in model.body.children():
        layer.attention.inner.kernel.spans.share.data.fill_(1.0)
    assert model(tokens[:, :1], None, state).logits.isfinite().all()


@pytest.mark.parametrize("spans", ["dynamic", "fixed"])
def test_variants_keep_their_promises(spans: str) -> None:
    only = {"causal", "cached", "padding-left", "padding-ragged", "gradients"}
    report = mf.check("adaptive-span", only=only, keywords={"span_kind": spans}, length=20)
    assert {row.verdict for row in report.rows if row.contract in only} == {"passed"}, str(report)


def test_a_penalty_shortens_what_is_not_needed() -> None:
    """Each symbol says the next one: nothing but the last one need be seen."""
    model = mf.build(
        "adaptive-span",
        vocab=6,
        dim=8,
        depth=1,
        heads=2,
        max_span=32,
        span_ramp=4,
        span_init=0.9,
        span_loss=0.01,
        dropout=0.0,
    )
    optimiser, tokens = make_optimizer(model, AdamConfig()), torch.arange(33)[None] % 6
    for step in range(25):
        for group in optimiser.param_groups:
            group["lr"] = 0.03
        loss = model.loss(CausalLMBatch(tokens[:, :-1], tokens[:, 1:], None))
        optimiser.zero_grad()
        (loss.total / loss.targets + loss.extra).backward()
        optimiser.step()
        run_post_step_updates(model, step + 1)
    assert model.body.get_submodule("0").attention.inner.kernel.spans.max_reach() < 20


def test_mistakes_are_refused() -> None:
    for wrong in ({"max_span": 0}, {"ramp": 1}):
        with pytest.raises(ValueError, match="must be at least 1 and ramp"):
            FixedAttentionSpans(2, **{"max_span": 4, "ramp": 4, **wrong})
    with pytest.raises(ValueError, match=r"initial_share \(1.5\)"):
        LearnedAttentionSpans(2, 4, initial_share=1.5)
    with pytest.raises(ValueError, match=r"initial_share \(1.0\)"):
        DynamicAttentionSpans(2, 4, initial_share=1.0)
    with pytest.raises(ValueError, match=r"span_loss \(-1.0\)"):
        AdaptiveSpanKernel(FixedAttentionSpans(2, 4), span_loss=-1.0)
    with pytest.raises(ValueError, match=r"max_distance \(0\)"):
        KeyDistancePosition(4, 0)


def test_grouped_heads_and_the_layer_around() -> None:
    spans, place = LearnedAttentionSpans(4, 16, ramp=4, initial_share=0.5), place_of(None, 1, 30)
    layer = Attention(8, 4, AdaptiveSpanKernel(spans), kv_heads=2, source=SpanCacheSource(spans))
    x = torch.randn(1, 30, 8)
    watched: dict[str, Any] = {}
    expected = layer(x, Context(place, None, lambda module, name, value: watched.update({name: value}))).y
    torch.testing.assert_close(layer(x, Context(place, None, no_watch)).y, expected)
    assert watched["spans"].shape == (1, 4, 1)


@pytest.mark.parametrize("training", [True, False])
def test_segments_after_a_cache_are_one_pass(training: bool) -> None:
    """Also where the cache holds more tokens than the spans reach, which are then not projected."""
    words: dict[str, Any] = {"vocab": 9, "dim": 12, "depth": 2, "heads": HEADS, "max_span": LONGEST, "span_ramp": 6}
    model = mf.build("adaptive-span", **words, dropout=0.0, memory_length=LONGEST).double().train(training)
    for layer, share in zip(model.body.children(), (0.1, 0.6)):
        layer.attention.inner.kernel.spans.share.data.fill_(share)
    assert model.carries_state
    tokens = torch.randint(9, (2, 100))
    full, state, parts = model(tokens).logits, model.init_state(2), []
    for part in tokens.split([20, 45, 1, 4, 30], 1):
        logits, state, _ = model(part, None, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-10, rtol=1e-10)


def test_spans_of_tokens_are_built_with_the_other_defaults() -> None:
    model = mf.build("adaptive-span", vocab=9, dim=12, depth=1, heads=HEADS, span_kind="dynamic", dropout=0.0)
    spans = model.body.get_submodule("0").attention.inner.kernel.spans
    torch.testing.assert_close(spans(torch.zeros(1, HEADS, 1, 1)), torch.full((1, HEADS, 1), 4096.0))
