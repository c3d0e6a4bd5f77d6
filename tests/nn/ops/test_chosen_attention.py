"""The choice of the highest scores is that of a stable sort, with ties, infinities and rows of any length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.nn.ops.chosen_attention import choose_highest_scores


def highest_scores_reference(scores: Float[Tensor, "*b n"], count: int) -> Int[Tensor, "*b c"]:
    """A stable sort of the reversed rows has the last of equal scores in front."""
    values, index = scores.flip(-1).sort(dim=-1, descending=True, stable=True)
    return torch.where(values == -torch.inf, -1, scores.shape[-1] - 1 - index)[..., :count]


def assert_same_choice(scores: Tensor, count: int) -> None:
    expected = highest_scores_reference(scores, count)
    assert torch.equal(choose_highest_scores(scores, count).sort().values, expected.sort().values)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), rows=st.integers(0, 5), length=st.integers(0, 40), values=st.integers(1, 5))
def test_the_choice_is_that_of_a_stable_sort(data: st.DataObject, rows: int, length: int, values: int) -> None:
    levels = torch.tensor([0.0, -0.0, -torch.inf, torch.inf, 1.0])[:values]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    scores = levels[torch.randint(values, (rows, 2, length), generator=generator)]
    assert_same_choice(scores, data.draw(st.integers(0, length + 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("length", "count"), [(200, 1), (200, 64), (4096, 5), (4096, 2048)])
def test_the_choice_in_long_rows(dtype: torch.dtype, length: int, count: int) -> None:
    assert_same_choice(torch.randn(3, length).to(dtype), count)
    assert_same_choice(torch.randn(3, length).round().to(dtype), count)
    assert_same_choice(torch.zeros(3, length, dtype=dtype), count)


def test_scores_that_are_no_numbers_choose_different_indices() -> None:
    chosen = choose_highest_scores(torch.full((1, 9), torch.nan), 4)[0].tolist()
    assert len(set(chosen)) == 4
    assert set(chosen) <= set(range(9))
