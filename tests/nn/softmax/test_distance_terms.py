"""Attention with terms by distance: fused forms are the softmax written out, gradients too, wherever queries lie."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from manyformer.nn.ops import attention_with_lse
from manyformer.nn.softmax import band as bands
from manyformer.nn.softmax import clipped_distance_attention, flex_attention, toeplitz_attention
from manyformer.nn.softmax.clipped_distance_attention import ClippedDistances
from manyformer.nn.softmax.toeplitz_attention import QueryOffset

HEADS, SCALE = 3, 0.4

PLACES = {"square": (19, 0, 0), "after keys": (19, 5, 0), "few after many": (7, 30, 0), "amid keys": (19, 3, 6)}
"""How many queries, keys before the first of them, and keys after the last."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toeplitz_attention, "BLOCK", 8)
    monkeypatch.setattr(bands, "BLOCK", 4)


@pytest.fixture(params=["fused", "written out"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "written out":
        monkeypatch.setattr(attention_with_lse, "FUSED", False)


def draw(place: str, value: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    queries, before, after = PLACES[place]
    keys = before + queries + after
    shapes = ((queries, 6), (keys, 6), (keys, value))
    return tuple(torch.randn(2, HEADS, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes)  # type: ignore[return-value]


def distances(place: str) -> Tensor:
    queries, before, after = PLACES[place]
    return torch.arange(before + queries + after) - torch.arange(queries)[:, None] - before


def by_hand(
    qkv: tuple[Tensor, Tensor, Tensor], ahead: Tensor, terms: Tensor, values: Tensor | float, causal: bool
) -> Tensor:
    """Softmax with everything written out; `terms` (.., l, s) and `values` (h, l, s, f) for each pair."""
    q, k, v = qkv
    scores = q @ k.mT * SCALE + terms
    if causal:
        scores = scores.masked_fill(ahead > 0, -torch.inf)
    return (scores.softmax(-1)[..., None] * (v[:, :, None] + values)).sum(-2)


def assert_same(run: Callable[[], Tensor], reference: Callable[[], Tensor], inputs: list[Tensor]) -> None:
    y, expected = run(), reference()
    torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)
    grad_output = torch.randn_like(y)
    actual = torch.autograd.grad((y * grad_output).sum(), inputs)
    torch.testing.assert_close(actual, torch.autograd.grad((expected * grad_output).sum(), inputs), atol=1e-10, rtol=0)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("width", [6, 5])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_bias_that_is_a_view(place: str, causal: bool, width: int) -> None:
    qkv, ahead = draw(place, width), distances(place)
    back = -int(ahead.min())
    bias = torch.randn(HEADS, back + int(ahead.max()) + 1, dtype=torch.float64)
    assert_same(
        lambda: toeplitz_attention.toeplitz_attention(
            *qkv, bias, back, QueryOffset(-int(ahead[0, 0]), causal), scale=SCALE
        ),
        lambda: by_hand(qkv, ahead, bias[:, ahead + back], 0.0, causal),
        list(qkv),
    )


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("kind", ["bias", "keys", "keys and values"])
@pytest.mark.parametrize("clip", [1, 3, 16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_terms_that_are_alike_far_away(place: str, causal: bool, clip: int, kind: str) -> None:
    qkv, ahead = draw(place), distances(place)
    back, front = min(clip, -int(ahead.min())), 0 if causal else min(clip, int(ahead.max()))
    rows = back + front + 1
    shape = (1, HEADS, 1, rows) if kind == "bias" else (2, HEADS, len(ahead), rows)
    terms = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    values = torch.randn(HEADS if clip > 1 else 1, rows, 6, dtype=torch.float64, requires_grad=True)
    with_values = kind == "keys and values"
    which = ahead.clamp(-back, front) + back
    reach = ClippedDistances(back, front, -int(ahead[0, 0]), causal)

    def reference() -> Tensor:
        each = terms.expand(2, HEADS, len(ahead), rows).gather(-1, which.expand(2, HEADS, -1, -1))
        return by_hand(qkv, ahead, each, values[:, which] if with_values else 0.0, causal)

    inputs = [*qkv, terms, *([values] if with_values else [])]
    assert_same(
        lambda: clipped_distance_attention.clipped_distance_attention(
            *qkv, terms, values if with_values else None, reach, scale=SCALE
        ),
        reference,
        inputs,
    )


@pytest.mark.parametrize("steep", [1.0, 30.0])
def test_what_counts_for_nothing_is_left_out(steep: float) -> None:
    """Weights far below the own one are hidden from the kernel, and no digit changes; others are all there."""
    qkv, ahead = draw("square"), distances("square")
    bias = steep * torch.arange(-18.0, 1.0, dtype=torch.float64).expand(HEADS, -1)
    span = QueryOffset(0, causal=True)
    sums = toeplitz_attention._bias_by_index_sum(bias, 18, span, 19, 19)
    kept = toeplitz_attention._mask_negligible(sums, *qkv[:2], span, SCALE).isfinite().sum(-1)
    assert (kept == 19).all() if steep == 1.0 else (kept < 10).all()
    assert_same(
        lambda: toeplitz_attention.toeplitz_attention(*qkv, bias, 18, span, scale=SCALE),
        lambda: by_hand(qkv, ahead, bias[:, (ahead + 18).clamp(max=18)], 0.0, causal=True),
        list(qkv),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_types(dtype: torch.dtype) -> None:
    """As near as the type allows, with gradients of the same type."""
    wide, ahead = draw("square"), distances("square")
    qkv = tuple(x.detach().to(dtype).requires_grad_() for x in wide)
    bias, terms = torch.randn(HEADS, 19), torch.randn(1, HEADS, 1, 4, requires_grad=True)
    values = torch.randn(1, 4, 6, dtype=dtype, requires_grad=True)
    runs: list[tuple[Tensor, Tensor]] = [
        (
            toeplitz_attention.toeplitz_attention(*qkv, bias, 18, QueryOffset(0, causal=True), scale=SCALE),  # type: ignore[arg-type]
            by_hand(wide, ahead, bias[:, (ahead + 18).clamp(max=18)], 0.0, causal=True),
        ),
        (
            clipped_distance_attention.clipped_distance_attention(
                *qkv, terms, values, ClippedDistances(3, 0, 0, causal=True), scale=SCALE
            ),  # type: ignore[arg-type]
            by_hand(wide, ahead, terms[0, :, 0, ahead.clamp(-3, 0) + 3], values[:, ahead.clamp(-3, 0) + 3], True),
        ),
    ]
    for y, expected in runs:
        assert y.dtype == dtype
        torch.testing.assert_close(
            y.double(), expected.double(), atol=0.05 if dtype == torch.bfloat16 else 1e-5, rtol=0
        )
        y.sum().backward()
        assert all(x.grad.dtype == x.dtype and x.grad.isfinite().all() for x in qkv)  # type: ignore[union-attr]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", ["bias", "keys"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_what_flex_attention_is_given(place: str, causal: bool, kind: str, recwarn: Any) -> None:
    """Its eager form, without gradients: that is all a CPU has of it."""
    qkv, ahead = draw(place), distances(place)
    terms = torch.randn(2, HEADS, len(ahead), 6, dtype=torch.float64)
    terms = terms[:1, :, :1] if kind == "bias" else terms
    which = ahead.clamp(-3, 2) + 3
    with torch.no_grad():
        q, k, v = (x.detach() for x in qkv)
        y = flex_attention.flex_bias_attention(
            q, k, v, terms, 3, 2, QueryOffset(-int(ahead[0, 0]), causal), scale=SCALE
        )
        each = terms.expand(2, -1, len(ahead), -1).gather(-1, which.expand(2, HEADS, -1, -1))
        torch.testing.assert_close(y, by_hand((q, k, v), ahead, each, 0.0, causal), atol=1e-10, rtol=0)
