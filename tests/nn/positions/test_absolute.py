"""Absolute positions against the formulas of the papers, written with plain loops, and against a released table."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from manyformer.models.embedding import positions_of
from manyformer.nn.core import PADDING_SEGMENT, Context, TokenPositions
from manyformer.nn.positions import (
    ConcatenatedGridPosition,
    LearnedPosition,
    LearnedStepSignal,
    NoPosition,
    PositionLayer,
    PositionStepSignal,
    SinusoidalPosition,
    SinusoidalStepSignal,
    SummedGridPosition,
    TransformerXLPosition,
)
from manyformer.nn.positions.absolute import AbsolutePosition
from token_rows import range_positions

LAYOUTS = ("interleaved", "halves", "timing")


def by_hand(length: int, dim: int, layout: str) -> Tensor:
    expected = torch.zeros(length, dim)
    half = dim // 2
    for pos in range(length):
        for i in range(half):
            angle = pos / 10000 ** (i / max(half - 1, 1) if layout == "timing" else 2 * i / dim)
            sine, cosine = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, half + i)
            expected[pos, sine], expected[pos, cosine] = math.sin(angle), math.cos(angle)
    return expected


@pytest.mark.parametrize("dim", [2, 10])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinusoid_is_the_formula(layout: Any, dim: int) -> None:
    expected = by_hand(50, dim, layout)
    sinusoid = SinusoidalPosition(dim, layout=layout)
    torch.testing.assert_close(sinusoid.rows(torch.arange(512))[:50], expected, atol=1e-6, rtol=0)
    for plain in (True, False):
        added = sinusoid.embed(torch.ones(2, 30, dim), range_positions(30, 20, plain=plain))
        torch.testing.assert_close(added - 1, expected[20:].expand(2, -1, -1), atol=1e-6, rtol=0)
    # beyond the table that is kept
    far = sinusoid.embed(torch.zeros(1, 3, dim), range_positions(3, 600))
    torch.testing.assert_close(far[0], by_hand(603, dim, layout)[600:], atol=1e-5, rtol=0)
    assert not list(sinusoid.state_dict())


def test_the_layouts_differ_as_they_should() -> None:
    interleaved, halves, timing = (
        SinusoidalPosition(64, layout=layout).rows(torch.arange(512))[:128] for layout in LAYOUTS
    )  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat([interleaved[:, ::2], interleaved[:, 1::2]], dim=1), halves, atol=1e-6, rtol=0)
    assert (timing - halves).abs().max() > 1
    # Tensor2Tensor's slowest wave is 10,000 positions to the radian exactly
    torch.testing.assert_close(timing[:, 31], torch.sin(torch.arange(128) / 10000), atol=1e-6, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_know_the_distance_and_shifts_are_rotations(layout: Any) -> None:
    table = SinusoidalPosition(16, layout=layout).rows(torch.arange(512)).double()
    products = table @ table.T
    for shift in (0, 1, 7, 100):
        torch.testing.assert_close(products[3, 3 + shift], products[200, 200 + shift], atol=1e-5, rtol=0)
    assert products[5, 5] == pytest.approx(8, abs=1e-5)
    # one linear map carries every position nine steps on
    turn = torch.linalg.lstsq(table[:480:2], table[9:489:2]).solution
    torch.testing.assert_close(table[1:480:2] @ turn, table[10:490:2], atol=1e-4, rtol=0)


@pytest.mark.oracle
@pytest.mark.parametrize("length", [128, 2048])
def test_gpt_j_has_the_same_halves(length: int) -> None:
    """Their angles are float32, so that one of 2047 radians is off by as much as its last bit, 1e-4."""
    from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

    ours = SinusoidalPosition(64, layout="halves").rows(torch.arange(length))
    torch.testing.assert_close(ours, create_sinusoidal_positions(length, 64), atol=length * 2**-24, rtol=0)


def test_far_positions_do_not_collide_in_half_precision() -> None:
    table = SinusoidalPosition(64).to(torch.bfloat16)
    near, far = (table.embed(torch.zeros(1, 1, 64), range_positions(1, at, plain=False)) for at in (70_000, 70_001))
    assert (near - far).abs().max() > 0.5


@pytest.mark.parametrize("dim", [64, 63])
def test_learned_positions_start_as_scaled_sinusoids(dim: int) -> None:
    table = LearnedPosition(dim, 40, std=0.05).weight.detach()
    assert table.shape == (40, dim)
    assert 0.045 < table.pow(2).mean().sqrt() < 0.055
    near, far = (torch.cosine_similarity(table[0], table[k], dim=0) for k in (1, 30))
    assert near > 0.9 > far
    if dim == 64:
        torch.testing.assert_close(table / (0.05 * math.sqrt(2)), SinusoidalPosition(dim).rows(torch.arange(512))[:40])


@pytest.mark.parametrize("plain", [True, False])
def test_a_learned_position_that_does_not_exist_is_refused(plain: bool) -> None:
    with pytest.raises(ValueError, match="position 5 does not exist: the model was built for max_length=5"):
        LearnedPosition(4, 5).embed(torch.zeros(1, 4, 4), range_positions(4, 2, plain=plain))


@pytest.mark.usefixtures("unchecked")
def test_widths_that_cannot_be_filled_are_refused() -> None:
    with pytest.raises(ValueError, match=r"SinusoidalPosition: dim \(7\) must be even"):
        SinusoidalPosition(7)
    with pytest.raises(ValueError, match=r"SinusoidalStepSignal: dim \(7\) must be even"):
        SinusoidalStepSignal(7)
    wrong: Any = "thirds"
    with pytest.raises(ValueError, match=r"layout \('thirds'\) must be one of interleaved, halves, timing"):
        SinusoidalPosition(8, layout=wrong)
    with pytest.raises(
        ValueError, match=r"PositionLayer: TransformerXLPosition acts on \['query', 'score'\] inside attention"
    ):
        PositionLayer(TransformerXLPosition(8, 2))


PARTS: dict[str, AbsolutePosition] = {
    "sinusoid": SinusoidalPosition(8, layout="timing"),
    "learned": LearnedPosition(8, 40, std=1.0),
    "sum": SummedGridPosition((4, 5), [LearnedPosition(8, 4, std=1.0), SinusoidalPosition(8)], prefix_tokens=1),
    "concat": ConcatenatedGridPosition((4, 5), [SinusoidalPosition(2), LearnedPosition(6, 5, std=1.0)]),
}


@pytest.mark.parametrize("kind", PARTS)
def test_left_padding_packing_and_pieces_change_nothing(kind: str) -> None:
    part = PARTS[kind]
    x = torch.randn(1, 9, 8)
    full = part.embed(x, range_positions(9))
    torch.testing.assert_close(part.embed(x, range_positions(9, plain=False)), full)
    pieces = [part.embed(x[:, a:b], range_positions(b - a, a)) for a, b in ((0, 1), (1, 6), (6, 9))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), full)
    segments = torch.tensor([[PADDING_SEGMENT] * 4 + [0] * 9, [0] * 3 + [1] * 9 + [PADDING_SEGMENT]])
    place, _ = positions_of(segments, segments, None)
    rows = torch.zeros(2, 13, 8)
    rows[0, 4:], rows[1, 3:12] = x[0], x[0]
    actual = part.embed(rows, place)
    torch.testing.assert_close(actual[0, 4:], full[0])
    torch.testing.assert_close(actual[1, 3:12], full[0])


def test_padding_may_carry_any_position() -> None:
    place = TokenPositions(torch.tensor([[999, 0, 1]]), torch.tensor([[PADDING_SEGMENT, 0, 0]]))
    part = LearnedPosition(4, 2, std=1.0)
    torch.testing.assert_close(part.embed(torch.zeros(1, 3, 4), place)[0, 1:], part.weight)


def test_a_position_for_each_layer_is_added_where_it_stands() -> None:
    x, tables = torch.randn(2, 6, 8), [LearnedPosition(8, 6, std=1.0) for _ in range(3)]
    y = x
    for table in tables:
        y = PositionLayer(table)(y, Context(range_positions(6))).y
    torch.testing.assert_close(y, x + sum(table.weight for table in tables))
    out = PositionLayer(NoPosition())(x, Context(range_positions(6)), "kept")
    assert torch.equal(out.y, x)
    assert out.state == "kept"


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_grid_reads_row_after_row(before: int) -> None:
    height, width = 3, 5
    rows, columns = LearnedPosition(8, height, std=1.0), LearnedPosition(8, width, std=1.0)
    grid = SummedGridPosition((height, width), [rows, columns], prefix_tokens=before)
    assert grid.max_length == before + 15
    actual = grid.embed(torch.zeros(1, grid.max_length, 8), range_positions(grid.max_length))[0]
    assert not actual[:before].any()
    for r in range(height):
        for c in range(width):
            cell = actual[before + r * width + c]
            torch.testing.assert_close(cell, rows.weight[r] + columns.weight[c])


def test_a_grid_of_three_axes_one_after_the_other() -> None:
    axes = [SinusoidalPosition(4), SinusoidalPosition(6, layout="halves"), LearnedPosition(2, 3, std=1.0)]
    actual = ConcatenatedGridPosition((2, 2, 3), axes).rows(torch.arange(12))
    for pos, (r, c, k) in enumerate((r, c, k) for r in range(2) for c in range(2) for k in range(3)):
        torch.testing.assert_close(
            actual[pos],
            torch.cat([axes[0].rows(torch.arange(512))[r], axes[1].rows(torch.arange(512))[c], axes[2].weight[k]]),
        )  # type: ignore[attr-defined]


@pytest.mark.usefixtures("unchecked")
def test_grids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="position 20 does not exist: the model was built for 4 x 5 cells after 0"):
        PARTS["concat"].embed(torch.zeros(1, 2, 8), range_positions(2, 19))
    with pytest.raises(ValueError, match="SummedGridPosition: 2 sizes need as many positions, not 1"):
        SummedGridPosition((2, 2), [SinusoidalPosition(4)])
    with pytest.raises(ValueError, match="axis 1 has 3 steps, but its position has max_length=2"):
        SummedGridPosition((2, 3), [SinusoidalPosition(4), LearnedPosition(4, 2)])
    with pytest.raises(ValueError, match=r"SummedGridPosition: shape \(2, 0\) must have sizes of at least 1"):
        SummedGridPosition((2, 0), [SinusoidalPosition(4), SinusoidalPosition(4)])


@pytest.mark.parametrize("plain", [True, False])
def test_the_signal_of_the_universal_transformer(plain: bool) -> None:
    """Section 2.1 of the paper: sines of the position and of the step, counted from 1, added up."""
    dim, length, start = 12, 6, 3
    timing = PositionStepSignal(SinusoidalPosition(dim), SinusoidalStepSignal(dim))
    x = torch.randn(2, length, dim)
    for step in range(4):
        expected = x.clone()
        for i in range(length):
            for k in range(dim // 2):
                rate = 10000 ** (-2 * k / dim)
                expected[:, i, 2 * k] += math.sin((start + i) * rate) + math.sin((step + 1) * rate)
                expected[:, i, 2 * k + 1] += math.cos((start + i) * rate) + math.cos((step + 1) * rate)
        actual = timing(x, range_positions(length, start, plain=plain), step)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


def test_the_signal_of_tensor2tensor() -> None:
    timing = PositionStepSignal(SinusoidalPosition(16, layout="timing"), LearnedStepSignal(16, 6))
    x = torch.randn(1, 4, 16)
    weight = timing.steps.weight
    assert isinstance(weight, Tensor)
    torch.testing.assert_close(timing(x, range_positions(4), 5), x + by_hand(4, 16, "timing") + 4 * weight[5])
    assert 0.8 < (4 * weight).std() < 1.2
    with pytest.raises(ValueError, match="step 6 does not exist: the table was built for max_length=6 steps"):
        timing(x, range_positions(4), 6)
    zero_based = SinusoidalStepSignal(16, layout="timing", first_step=0)
    torch.testing.assert_close(zero_based(3), by_hand(4, 16, "timing")[3])


def test_the_same_weights_at_every_step_tell_steps_apart() -> None:
    timing = PositionStepSignal(LearnedPosition(8, 5), SinusoidalStepSignal(8))
    x = torch.zeros(1, 5, 8)
    first, second = (timing(x, range_positions(5), step) for step in (0, 1))
    gap = second - first
    assert gap.abs().max() > 0.1
    torch.testing.assert_close(gap, gap[:, :1].expand_as(gap))
    assert timing.max_length == 5
