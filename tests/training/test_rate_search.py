"""Which rate the losses of a range test suggest."""

import pytest

from manyformer.training.rate_search import smooth, suggest_rate

RATES = [10.0**power for power in range(-5, 2)]


def test_the_suggestion_is_a_tenth_of_the_rate_of_the_lowest_loss() -> None:
    suggested, reason = suggest_rate(RATES, [4.0, 4.0, 3.5, 2.0, 1.5, 6.0], diverged=True)
    assert suggested == pytest.approx(0.01)
    assert reason.startswith("the loss falls fastest near 0.001 and is lowest at 0.1 (1.500); a tenth")
    _, reason = suggest_rate(RATES, [4.0, 4.0, 3.5, 3.0, 2.5, 2.0, 1.0], diverged=False)
    assert "the last rate that was tried" in reason


def test_losses_that_never_fall_suggest_nothing() -> None:
    suggested, reason = suggest_rate(RATES, [4.0, 4.1, 5.0], diverged=True)
    assert suggested is None
    assert "never falls" in reason


def test_smoothing_looks_to_both_sides() -> None:
    assert smooth([0.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0])[3] == 1.0
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])[4] == pytest.approx(5.0)
