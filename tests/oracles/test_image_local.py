"""Query blocks of images against a released package and against FlexAttention."""

import warnings

import pytest
import torch

from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn import masks as m
from manyformer.nn.core import ContiguousLayout, TokenPositions
from manyformer.nn.positions import NoPosition

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("length", [64, 75])
def test_one_dimension_is_local_attention_that_looks_one_block_back(length: int) -> None:
    local = pytest.importorskip("local_attention")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, length, 8).unbind()
    reference = local.LocalAttention(
        window_size=16,
        causal=True,
        look_backward=1,
        dropout=0.0,
        autopad=True,
        exact_windowsize=False,
        use_rotary_pos_emb=False,
    )
    pos = torch.arange(length).expand(2, -1)
    place = TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout())
    mask = m.Causal() & m.LocalBlocks(16, lookback=16)
    for path in ("naive", "sparse"):
        ours = SoftmaxKernel(mask, path=path)(KernelCall(q, k, v, place, place, NoPosition())).y  # type: ignore[arg-type]
        torch.testing.assert_close(ours, reference(q, k, v), rtol=1e-5, atol=1e-5)


def test_two_dimensions_are_flex_attention_over_rows_and_columns() -> None:
    from torch import Tensor
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from manyformer.nn.structures import pixel_order

    height, width, rows, columns, above, beside = 12, 10, 4, 5, 3, 2
    cells = height * width
    order = torch.from_numpy(pixel_order((height, width, 1), (rows, columns)))
    row, column = order // width, order % width
    top, left = row // rows * rows, column // columns * columns

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = (top[i] == top[j]) & (left[i] == left[j])
        side = (column[j] >= left[i] - beside) & (column[j] < left[i] + columns + beside)
        over = (row[j] >= top[i] - above) & (row[j] < top[i]) & side
        aside = (top[j] == top[i]) & (column[j] < left[i]) & (column[j] >= left[i] - beside)
        return (same & (j <= i)) | over | aside

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, cells, 16).unbind()
    with warnings.catch_warnings():
        # without compilation it is torch's own reference form, and warns that it is slow
        warnings.simplefilter("ignore")
        blocks = create_block_mask(seen, None, None, cells, cells, device="cpu")
        expected = flex_attention(q, k, v, block_mask=blocks)
    pos = torch.arange(cells).expand(2, -1)
    place = TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout())
    mask = m.Local2D(width, rows, columns, above, beside)
    for path in ("naive", "sparse"):
        ours = SoftmaxKernel(mask, path=path)(KernelCall(q, k, v, place, place, NoPosition())).y  # type: ignore[arg-type]
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
