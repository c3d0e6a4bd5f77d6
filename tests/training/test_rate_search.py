"""Which rate the losses of a range test suggest."""

import pytest

from manyformer.training.rate_search import smooth, suggest_rate

RATES = [10.0 ** (power / 10) for power in range(-60, 1)]
FALLING = [4 - 3 / (1 + (rate / 1e-3) ** -2) for rate in RATES]
"""Losses that fall from 4 to 1, fastest at a rate of 1e-3."""


def test_the_suggestion_is_the_rate_at_which_the_loss_falls_fastest() -> None:
    rising = [loss + 5000 * max(0.0, rate - 1e-2) ** 2 for loss, rate in zip(FALLING, RATES)]
    suggested, reason = suggest_rate(RATES, rising)
    assert suggested == pytest.approx(1e-3, rel=0.3)
    assert reason.startswith("the loss falls fastest near 0.001; it is lowest at 0.01")
    assert "rises after that" in reason
    suggested, reason = suggest_rate(RATES, FALLING)
    assert suggested == pytest.approx(1e-3, rel=0.3)
    assert "the last rate that was tried" in reason


def test_losses_that_never_fall_suggest_nothing() -> None:
    suggested, reason = suggest_rate([0.1, 0.2, 0.3], [4.0, 4.1, 5.0])
    assert suggested is None
    assert "never falls" in reason


def test_smoothing_looks_to_both_sides() -> None:
    assert smooth([0.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0])[3] == 1.0
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])[4] == pytest.approx(5.0)
