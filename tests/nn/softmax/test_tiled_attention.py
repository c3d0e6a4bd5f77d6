"""Any position over what a mask shows: as written out in full, gradients too, in pieces that are linear in length."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manyformer.analysis.benchmarks import LargestTensorMode
from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn import masks as m
from manyformer.nn.core import GLOBAL_ROLE, PADDING_SEGMENT, SUMMARY_ROLE, TokenPositions
from manyformer.nn.masks import Mask
from manyformer.nn.positions import (
    AlibiPosition,
    DistanceAwarePosition,
    Position,
    RelativeLabelPosition,
    ShawPosition,
    TransformerXLPosition,
)
from manyformer.nn.runtime.costs import count_flops
from manyformer.nn.softmax import softmax_kernel, sparse_plan, tiled_attention
from manyformer.nn.softmax import sparse_plan as plans
from softmax_calls import HEADS, KEY, VALUE
from token_rows import segment_positions

LENGTH = 61
MASKS: dict[str, Mask] = {
    "window": m.Window(12),
    "both sides": m.symmetric_window(5) | m.GlobalTokens(m.FirstTokens(2) | m.WithRole(GLOBAL_ROLE)),
    "per head": m.PerHead({1: m.Window(9, dilation=3), 2: m.NoKeys()}, default=m.symmetric_window(4)),
    "random": m.LocalBlocks(4) | m.RandomBlocks(4, 2, 16, seed=3),
    "pieces": m.four_piece_pattern(m.WithRole(SUMMARY_ROLE), l2l=m.symmetric_window(5), g2l=m.SamePart()),
}
ROWS = {
    "plain": [[0] * LENGTH] * 2,
    "packed": [[0] * 20 + [1] * (LENGTH - 20), [PADDING_SEGMENT] * 9 + [0] * 40 + [2] * (LENGTH - 49)],
}
POSITIONS: dict[str, Callable[[], Position]] = {
    "labels": lambda: RelativeLabelPosition(KEY, HEADS, 4),
    "distances on values": lambda: ShawPosition(KEY, 5, value_width=VALUE, heads=HEADS),
    "slopes": lambda: AlibiPosition(HEADS),
    "weights": lambda: DistanceAwarePosition(HEADS),
    "sinusoids": lambda: TransformerXLPosition(8, HEADS, width=KEY),
}


def inputs(positions: TokenPositions, groups: int = HEADS) -> list[Tensor]:
    shapes = ((HEADS, KEY), (groups, KEY), (groups, VALUE))
    rows, length = positions.position_ids.shape
    return [torch.randn(rows, heads, length, width, dtype=torch.float64, requires_grad=True) for heads, width in shapes]


def marked(positions: TokenPositions) -> TokenPositions:
    """With a few summaries and global tokens, and parts of seven."""
    role = torch.zeros_like(positions.position_ids)
    role[:, ::17], role[:, 5::30] = SUMMARY_ROLE, GLOBAL_ROLE
    return positions._replace(roles=role, part_ids=positions.position_ids // 7)


def both(
    mask: Mask, positions: TokenPositions, position: Position, groups: int = HEADS
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs and gradients of inputs and of the position, in blocks and written out."""
    qkv = inputs(positions, groups)
    expected = [*qkv, *position.parameters()]
    grad_output = (
        torch.randn(*qkv[0].shape[:3], VALUE, dtype=torch.float64)
        * (positions.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    )
    actual = []
    for path in ("blocked", "naive"):
        y = SoftmaxKernel(mask, path=path)(KernelCall(*qkv, positions, positions, position)).y * (grad_output != 0)  # type: ignore[arg-type]
        actual.append((y, *torch.autograd.grad((y * grad_output).sum(), expected)))
    return actual[0], actual[1]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PAIR_RATES", {4: 1.0, 8: 1.0}), ("CALL", 0), ("GATHERED_KEY", 0)):
        monkeypatch.setattr(sparse_plan, name, value)
    monkeypatch.setattr(plans, "BLOCK", 8)
    monkeypatch.setattr(plans, "MIN_ROW_PLAN_PAIRS", 0)
    # several pieces of each kind
    monkeypatch.setattr(tiled_attention, "SCORES_PER_PIECE", 1 << 12)
    monkeypatch.setattr(softmax_kernel, "BLOCK", 8)
    monkeypatch.setattr(softmax_kernel, "MAX_REFERENCE_PAIRS", 64)
    plans._plan_for_layouts.cache_clear()
    plans._recipe_for_layouts.cache_clear()


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("small_blocks", "unchecked")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("name", "position"),
    [*((name, "labels") for name in MASKS), *(("both sides", name) for name in POSITIONS if name != "labels")],
)
def test_it_is_the_definition(name: str, position: str, rows: str) -> None:
    place = segment_positions(ROWS[rows])
    place = place if name in ("window", "random") else marked(place)
    position_part = POSITIONS[position]().double()
    mask = MASKS[name]
    qkv = inputs(place)
    assert "computed in visible blocks" in SoftmaxKernel(mask, path="blocked").explain(
        KernelCall(*qkv, place, place, position_part)
    )
    assert "of the cost of all pairs" in SoftmaxKernel(mask, path="blocked").explain(
        KernelCall(*qkv, place, place, position_part)
    )
    actual, expected = both(mask, place, position_part, 2)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.usefixtures("small_blocks", "unchecked")
def test_dropout_keeps_the_mean_and_is_the_same_again() -> None:
    """The second forward pass, for the gradient, drops what the first one did."""
    place = segment_positions([[0] * LENGTH])
    q, k, v = (x[:1].detach() for x in inputs(place))
    v = torch.ones_like(v)
    kernel = SoftmaxKernel(m.Window(20), dropout=0.4, path="blocked").train()
    weight = torch.ones_like(v).requires_grad_()
    y = kernel(KernelCall(q, k, v * weight, place, place, AlibiPosition(HEADS))).y
    assert 0.9 < y.mean() < 1.1
    assert y.std() > 0.05
    (gradient,) = torch.autograd.grad(y.sum(), weight)
    torch.testing.assert_close(gradient.sum(), y.sum())


def test_work_and_memory_are_linear() -> None:
    work, largest, lengths = [], [], (512, 2048)
    for length in lengths:
        place = segment_positions([[0] * length])
        q, k, v = (torch.zeros(1, 1, length, 8, requires_grad=True) for _ in range(3))
        kernel, position = SoftmaxKernel(m.symmetric_window(64)), RelativeLabelPosition(8, 1, 4)

        def job() -> None:
            kernel(KernelCall(q, k, v, place, place, position)).y.sum().backward()  # noqa: B023

        work.append(count_flops(job))
        with LargestTensorMode() as seen:
            job()
        largest.append(seen.elements)
    assert math.log(work[1] / work[0]) / math.log(4) <= 1.05
    assert largest[1] < lengths[1] ** 2 / 3
