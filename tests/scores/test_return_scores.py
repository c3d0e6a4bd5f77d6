"""Scores of episodes: means with intervals that hold what they promise."""

import numpy as np
import pytest

from manyformer.errors import UserError
from manyformer.scores import mean_length, mean_return, success_rate


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution_for_many_episodes() -> None:
    returns = np.random.default_rng(0).normal(3, 2, 1000)
    score = mean_return(returns)
    error = returns.std() / np.sqrt(1000)
    assert score.value == pytest.approx(returns.mean())
    assert score.parts["low"] == pytest.approx(returns.mean() - 1.96 * error, abs=0.02)
    assert score.parts["high"] == pytest.approx(returns.mean() + 1.96 * error, abs=0.02)
    assert score.signature.startswith("95% interval 2.7")
    assert score.signature.endswith("|bootstrap|episodes:1000")


def test_the_interval_of_a_share_is_that_of_wilson() -> None:
    """8 of 10: 0.4902 to 0.9433, a textbook example; none is certain where all succeed."""
    score = success_rate(np.array([True] * 8 + [False] * 2))
    assert (score.value, score.parts["low"], score.parts["high"]) == pytest.approx((80, 49.02, 94.33), abs=0.01)
    certain = success_rate(np.ones(100, bool))
    assert certain.parts["high"] == pytest.approx(100)
    assert certain.parts["low"] == pytest.approx(96.3, abs=0.01)


def test_lengths_and_nothing_to_score() -> None:
    assert str(mean_length(np.array([3, 4]))) == "episode length 3.5 (episodes:2)"
    with pytest.raises(UserError, match="there are no episodes to score"):
        mean_return(np.empty(0))
