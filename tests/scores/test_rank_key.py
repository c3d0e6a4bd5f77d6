"""A score that is no finite number is never the best, whichever way is better."""

import math

import pytest

from manyformer.scores import is_comparable, rank_key


@pytest.mark.parametrize("lower_is_better", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_what_cannot_be_compared_comes_last(bad: float | None, lower_is_better: bool) -> None:
    assert not is_comparable(bad)
    scores = [bad, 3.0, -2.0]
    ranked = sorted(scores, key=lambda score: rank_key(score, lower_is_better=lower_is_better))
    assert ranked[:2] == ([-2.0, 3.0] if lower_is_better else [3.0, -2.0])
