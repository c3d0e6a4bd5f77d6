"""The patterns of the papers, against their own formulas, and what follows from them."""

import math

import pytest
import torch
from torch import Tensor

from manyformer.nn import masks as m
from manyformer.nn.core import TokenPositions
from manyformer.nn.masks import Mask
from manyformer.recipes.blockwise import shifted_blocks_mask
from manyformer.recipes.longformer import layer_mask
from manyformer.recipes.sparse_transformer import masks_by_layer

N = 24


def seen(mask: Mask, length: int = N, heads: int = 1) -> Tensor:
    """What every head sees, (h, l, s)."""
    pos = torch.arange(length)[None]
    place = TokenPositions(pos, torch.zeros_like(pos))
    return mask.dense(place, place, heads)[0].expand(heads, -1, -1)


def pairs(rule: object, length: int = N) -> Tensor:
    return torch.tensor([[bool(rule(i, j)) for j in range(length)] for i in range(length)])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        (m.Window(5), lambda i, j: 0 <= i - j < 5),
        (m.Window(3, lookahead=2), lambda i, j: -2 <= i - j <= 2),
        (m.symmetric_window(4), lambda i, j: abs(i - j) <= 4),
        (m.Window(4, dilation=3), lambda i, j: i - j in (0, 3, 6, 9)),
        (m.Window(2, lookahead=1, dilation=2), lambda i, j: i - j in (-2, 0, 2)),
        (m.Stride(5), lambda i, j: (i - j) % 5 == 0),
        (m.LocalBlocks(5), lambda i, j: i // 5 == j // 5),
        (m.LocalBlocks(5, lookback=3, lookahead=1), lambda i, j: i // 5 * 5 - 3 <= j <= i // 5 * 5 + 5),
        (m.BlockCausal(5), lambda i, j: j // 5 <= i // 5),
        (m.BlockCausal(1), lambda i, j: j <= i),
        (m.PermutedBlocks(8, 1, 2, 0), lambda i, j: j // 8 == (i // 8 + 1) % 3),
        (m.PermutedBlocks(6, 1, 0), lambda i, j: i < 12 and j < 12 and i // 6 != j // 6),
        (m.VisibleToAll(m.FirstTokens(3)), lambda i, j: j < 3),
        (m.AttendsToAll(m.AtPositions(1, 7)), lambda i, j: i in (1, 7)),
        (m.GlobalTokens(m.PeriodicTokens(6, 4, 5)), lambda i, j: i % 6 == 4 or j % 6 == 4),
        (m.prefix_lm(m.FirstTokens(5)), lambda i, j: j <= i or j < 5),
        (m.union(m.strided_pattern(5)), lambda i, j: j <= i and (i - j <= 5 or (i - j) % 5 == 0)),
        (m.union(m.fixed_pattern(6, 2)), lambda i, j: j <= i and (i // 6 == j // 6 or j % 6 >= 4)),
        (m.fixed_pattern(6, 2, part_index=1)[1], lambda i, j: j <= i and j % 6 in (2, 3)),
        (
            m.four_piece_pattern(
                m.FirstTokens(3),
                l2l=m.symmetric_window(2),
                g2g=m.Causal(),
                g2l=m.LocalBlocks(12),
                l2g=m.VisibleToAll(m.FirstTokens(2)),
            ),
            lambda i, j: [[abs(i - j) <= 2, j < 2], [i // 12 == j // 12, j <= i]][i < 3][j < 3],
        ),
        (m.ListedBlocks(4, ((2,), (), (0, 5))), lambda i, j: j // 4 in {0: (2,), 2: (0, 5)}.get(i // 4, ())),
    ],
    ids=lambda value: repr(value) if isinstance(value, Mask) else "",
)
def test_formulas(mask: Mask, rule: object) -> None:
    assert (seen(mask)[0] == pairs(rule)).all()
    assert eval(repr(mask), vars(m)) == mask
    assert hash(eval(repr(mask), vars(m))) == hash(mask)


@pytest.mark.parametrize(("above", "beside"), [(2, 1), (3, 4), (0, 2)])
def test_image_blocks(above: int, beside: int) -> None:
    """By rows and columns of pixels, in the order of generation."""
    width, height, rows, columns = 12, 9, 3, 4
    corners = [(r, c) for r in range(0, height, rows) for c in range(0, width, columns)]
    pixels = [(top + r, left + c) for top, left in corners for r in range(rows) for c in range(columns)]
    owner = [corner for corner in corners for _ in range(rows * columns)]

    def rule(i: int, j: int) -> bool:
        (top, left), (row, column) = owner[i], pixels[j]
        over = top - above <= row < top and left - beside <= column < left + columns + beside
        aside = top <= row < top + rows and left - beside <= column < left
        return over or aside or (owner[i] == owner[j] and j <= i)

    mask = m.Local2D(width, rows, columns, above, beside)
    actual = seen(mask, width * height)[0]
    assert (actual == pairs(rule, width * height)).all()
    assert not actual.triu(1).any()
    assert actual.diagonal().all()
    inner = max(i for i in range(width * height) if owner[i] == (6, 4))
    most = rows * columns + rows * beside + above * (columns + 2 * beside)
    assert actual[inner].sum() == most
    reach = (torch.arange(width * height)[:, None] - torch.arange(width * height))[actual].max()
    assert mask.max_lookback is not None
    assert reach <= mask.max_lookback
    # no slot of a cache too many where blocks divide what is seen around them
    assert (reach == mask.max_lookback) == (above % rows == beside % columns == 0)


@pytest.mark.parametrize("past", [True, False])
def test_random_blocks(past: bool) -> None:
    mask = m.RandomBlocks(3, 2, 10, seed=5, local_blocks=1, skip_first=1, skip_last=0 if past else 1, past_only=past)
    actual = seen(mask, 30, 3)
    cells = actual.unflatten(1, (10, 3)).unflatten(3, (10, 3))
    blocks = cells.any(4).any(2)
    assert (blocks == cells.all(4).all(2)).all()
    assert (blocks[0] != blocks[1]).any()
    own, other = torch.arange(10)[:, None], torch.arange(10)
    assert not (blocks & ((own - other).abs() <= 1)).any()
    assert not blocks[:, :, 0].any()
    assert not past or not (blocks & (other > own)).any()
    assert past or not blocks[:, :, 9].any()
    assert (blocks.sum(-1) == 2)[:, 4:].all()
    again = seen(
        m.RandomBlocks(3, 2, 10, seed=5, local_blocks=1, skip_first=1, skip_last=0 if past else 1, past_only=past),
        30,
        3,
    )
    assert (actual == again).all()
    assert (actual != seen(m.RandomBlocks(3, 2, 10, seed=6, past_only=past), 30, 3)).any()
    assert mask.causal == past
    if past:
        longer = m.RandomBlocks(3, 2, 20, seed=5, local_blocks=1, skip_first=1, past_only=True)
        assert longer.for_head(1).rows[:10] == mask.for_head(1).rows  # type: ignore[attr-defined]


def test_random_blocks_bring_all_near() -> None:
    """Zaheer et al., section 2: with a window alone the farthest blocks are 63 steps apart."""

    def diameter(adjacent: Tensor) -> int:
        reached, steps = torch.eye(len(adjacent)).bool(), 0
        while not reached.all():
            reached, steps = (reached.float() @ adjacent.float()) > 0, steps + 1
        return steps

    window = m.LocalBlocks(1, lookback=1, lookahead=1)
    assert diameter(seen(window, 64)[0]) == 63
    assert diameter(seen(window | m.RandomBlocks(1, 3, 64), 64)[0]) <= 7


def test_two_steps_of_a_sparse_transformer_lead_anywhere() -> None:
    """Child et al., section 4.2; the fixed pattern needs both sets in each step."""
    past = torch.ones(64, 64).tril().bool()
    near, far = (seen(mask, 64)[0].float() for mask in m.strided_pattern(8))
    assert ((near @ far > 0) == past).all()
    merged = seen(m.union(m.fixed_pattern(8, 1)), 64)[0].float()
    assert ((merged @ merged > 0) == past).all()
    near, far = (seen(mask, 64)[0].float() for mask in m.fixed_pattern(8, 1))
    assert ((far @ near > 0) != past).any()


def test_three_uses_of_two_patterns() -> None:
    near, far = m.fixed_pattern(8, 2)
    assert masks_by_layer("fixed", "merged", 8, 2, 4)(3) == near | far
    turns = masks_by_layer("fixed", "interleaved", 8, 2, 4)
    assert [turns(0), turns(1), turns(2)] == [near, far, near]
    by_heads = masks_by_layer("fixed", "heads", 8, 2, 4)(0)
    assert by_heads == m.PerHead({0: near, 1: far, 2: near, 3: m.fixed_pattern(8, 2, part_index=1)[1]})
    assert masks_by_layer("strided", "heads", 8, 2, 2)(1) == m.alternate_heads(m.strided_pattern(8), 2)


def test_windows_grow_and_get_gaps() -> None:
    sizes = m.growing_windows(5, 32, 512)
    assert [sizes(layer) for layer in range(5)] == [32, 64, 128, 256, 512]
    assert m.growing_windows(1, 7, 9)(0) == 7
    with pytest.raises(ValueError, match="bottom \\(0\\)"):
        m.growing_windows(2, 0, 3)
    # appendix A: small model, 12 layers, gaps of 0 in the lower half, then 1, 2, 3 in two layers each, in two heads
    gaps = [layer_mask(4, layer, 12, 2).for_head(0).periods for layer in range(12)]
    assert gaps == [frozenset()] * 6 + [frozenset({n}) for n in (2, 2, 3, 3, 4, 4)]
    assert layer_mask(4, 11, 12, 2).for_head(2) == m.Window(4)
    assert layer_mask(4, 11, 12, 0) == m.Window(4)


def test_heads_of_blockwise_attention() -> None:
    """Qiu et al., table 3: 10 and 2 heads of 12 for two blocks, 8, 2 and 2 for three."""
    for blocks, counts in ((2, [10, 2]), (3, [8, 2, 2])):
        mask = shifted_blocks_mask(12, 4, blocks)
        kinds = [mask.for_head(head) for head in range(12)]
        orders = [tuple((b + d) % blocks for b in range(blocks)) for d in range(blocks)]
        assert [kinds.count(m.PermutedBlocks(4, *order)) for order in orders] == counts
    reached = seen(shifted_blocks_mask(2, 12, 2), heads=2).any(0).float()
    assert (reached @ reached > 0).all()


def test_a_stack_of_windows_sees_as_far_as_its_windows_together() -> None:
    one = seen(m.symmetric_window(2))[0].float()
    three = one @ one @ one > 0
    assert (three == pairs(lambda i, j: abs(i - j) <= 6)).all()


def test_nonsense_is_refused() -> None:
    for make in (
        lambda: m.Window(0),
        lambda: m.Window(3, dilation=0),
        lambda: m.Stride(0),
        lambda: m.LocalBlocks(0),
        lambda: m.PermutedBlocks(4, 0, 2),
        lambda: m.Local2D(10, 2, 4, 1, 1),
        lambda: m.PeriodicTokens(4, 3, 3),
        lambda: m.FirstTokens(-1),
        lambda: m.RandomBlocks(0, 1, 1),
        lambda: m.ListedBlocks(0, ()),
        lambda: m.fixed_pattern(8, 5, part_index=1),
    ):
        with pytest.raises(ValueError, match=r"\d"):
            make()


def test_nothing_grows_with_the_square_of_the_length() -> None:
    """Visible pairs of the patterns at n and 2 n: n or n sqrt(n), never n^2."""
    for mask, power in ((m.Window(16), 1.0), (m.union(m.fixed_pattern(16, 1)), 1.6), (m.Causal(), 2.0)):
        counts = [seen(mask, length).sum().item() for length in (128, 256)]
        slope = math.log2(counts[1] / counts[0])
        assert abs(slope - power) < 0.25
