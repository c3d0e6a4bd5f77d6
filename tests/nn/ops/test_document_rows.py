"""Documents on lines of their own and back."""

import pytest
import torch

from layouts import LAYOUTS, LENGTH, ROWS, place_of
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.nn.ops.document_rows import grid_by_run


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("last", [LENGTH, 6])
def test_tokens_come_back_from_the_grid(layout: str, last: int) -> None:
    of = place_of(layout)
    lines = grid_by_run(of)
    x = torch.randn(ROWS, 2, last, 3)
    real = (of.segment_ids[:, -last:] != PADDING_SEGMENT)[:, None, :, None].expand_as(x)
    laid = lines.scatter(x)
    assert (lines.gather(laid, last) == torch.where(real, x, 0.0)).all()
    assert int(lines.present.max()) <= 1
    assert int(lines.present.sum()) == int((of.segment_ids != PADDING_SEGMENT).sum())
    # every line is one document from its first position on
    assert (lines.present[:, 1:] <= lines.present[:, :-1]).all()
