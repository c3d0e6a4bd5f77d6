"""Learn then test: p-values, the order of tests, and that the guarantee holds in repeated sampling."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from manyformer.base.errors import UserError
from manyformer.inference.early_exit.calibration import (
    binomial_cdf,
    fixed_sequence_test,
    hoeffding_bentkus_p_value,
    hoeffding_p_value,
    required_count,
)
from manyformer.inference.early_exit.early_decoding import rouge_l_distance, token_f1_distance


@pytest.mark.parametrize(("count", "share"), [(1, 0.3), (7, 0.5), (60, 0.05), (200, 0.9)])
def test_coins_are_those_of_exact_arithmetic(count: int, share: float) -> None:
    a, b = share.as_integer_ratio()
    chances = [math.comb(count, k) * a**k * (b - a) ** (count - k) for k in range(count + 1)]
    for most in range(0, count + 1, 1 + count // 20):
        exact = float(Fraction(sum(chances[: most + 1]), b**count))
        assert binomial_cdf(most, count, share) == pytest.approx(exact, rel=1e-12)


def test_hoeffding_in_numbers() -> None:
    """h(0.1, 0.2) = 0.1 ln 0.5 + 0.9 ln 1.125; no risk at all gives (1 - tolerance)^n, too much nothing."""
    assert hoeffding_p_value(0.1, 50, 0.2) == pytest.approx(
        math.exp(-50 * (0.1 * math.log(0.5) + 0.9 * math.log(1.125)))
    )
    assert hoeffding_p_value(0.0, 10, 0.3) == pytest.approx(0.7**10)
    assert hoeffding_p_value(0.5, 10, 0.3) == 1.0
    # the plain form is looser
    assert hoeffding_p_value(0.1, 50, 0.2) < math.exp(-2 * 50 * 0.1**2)


def test_more_loss_never_makes_surer() -> None:
    values = [hoeffding_bentkus_p_value(risk, 90, 0.1) for risk in np.linspace(0, 0.3, 61)]
    assert all(a <= b for a, b in itertools.pairwise(values))


@pytest.mark.oracle
def test_p_values_are_those_of_mapie() -> None:
    pytest.importorskip("mapie")
    from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value

    risks = np.linspace(0, 0.4, 41)
    for count in (20, 133, 1000):
        for tolerance in (0.02, 0.1, 0.3):
            reference = np.ravel(compute_hoeffding_bentkus_p_value(risks, count, np.array([tolerance])))
            ours = [hoeffding_bentkus_p_value(float(risk), count, tolerance) for risk in risks]
            np.testing.assert_allclose(ours, np.minimum(reference, 1.0), rtol=0.0, atol=1e-12)


def test_the_first_failure_ends_it() -> None:
    asked: list[float] = []

    def losses() -> object:
        for threshold, bad in ((0.9, 0), (0.8, 1), (0.7, 60), (0.6, 0)):
            asked.append(threshold)
            yield threshold, [1.0] * bad + [0.0] * (200 - bad)

    actual = list(fixed_sequence_test(losses(), tolerance=0.1, confidence=0.95))  # type: ignore[arg-type]
    assert [one.certified for one in actual] == [True, True, False]
    assert asked == [0.9, 0.8, 0.7]
    assert [one.risk for one in actual] == [0.0, 0.005, 0.3]


def test_thresholds_that_cannot_be_tested_are_refused() -> None:
    with pytest.raises(UserError, match="tolerance"):
        list(fixed_sequence_test([(0.5, [0.0])], tolerance=1.0, confidence=0.9))
    with pytest.raises(UserError, match="without prompts"):
        list(fixed_sequence_test([(0.5, [])], tolerance=0.1, confidence=0.9))
    with pytest.raises(UserError, match=r"descending order, but 0\.6 follows 0\.5"):
        list(fixed_sequence_test([(0.5, [0.0] * 99), (0.6, [0.0] * 99)], tolerance=0.1, confidence=0.9))
    assert required_count(0.05, 0.95) == 59
    count = required_count(0.05, 0.95, 0.02)
    assert hoeffding_p_value(0.02, count, 0.05) <= 0.05 < hoeffding_p_value(0.02, count - 1, 0.05)
    assert hoeffding_bentkus_p_value(0.0, 59, 0.05) <= 0.05 < hoeffding_bentkus_p_value(0.0, 58, 0.05)


@pytest.mark.parametrize("kind", ["coins", "shares"])
def test_the_guarantee_holds_in_200_resamplings(kind: str) -> None:
    """Losses whose true means are known; the threshold that is chosen may exceed the tolerance in 1 - confidence."""
    draw = np.random.default_rng(0)
    thresholds = np.linspace(0.95, 0.05, 19)
    means = 0.4 * (1 - thresholds) ** 1.5
    tolerance, confidence, count = 0.1, 0.9, 300
    chosen = []
    for _ in range(200):
        if kind == "coins":
            rows = draw.random((len(means), count)) < means[:, None]
        else:
            rows = draw.beta(2 * means[:, None], 2 * (1 - means[:, None]), (len(means), count))
        actual = fixed_sequence_test(
            zip(thresholds.tolist(), rows.astype(float)), tolerance=tolerance, confidence=confidence
        )
        passed = [one for one in actual if one.certified]
        chosen.append(means[len(passed) - 1] if passed else 0.0)
    wrong = np.mean(np.array(chosen) > tolerance)
    assert wrong <= 0.1 + 2 * math.sqrt(0.1 * 0.9 / 200)
    # and it is of use: most of what is allowed is used
    assert np.mean(chosen) > 0.4 * tolerance


def test_the_guarantee_holds_for_documents_and_not_for_their_prompts() -> None:
    """20 prompts of each of 60 documents, nearly all of whose losses are those of their document."""
    draw = np.random.default_rng(0)
    thresholds, tolerance, confidence = np.linspace(0.95, 0.05, 19), 0.1, 0.9
    means = 0.4 * (1 - thresholds) ** 1.5
    wrong = {"documents": 0, "prompts": 0}
    for _ in range(200):
        # a text that is lost at one threshold is lost at all lower ones
        luck = np.where(draw.random((60, 20)) < 0.9, draw.random((60, 1)), draw.random((60, 20)))
        losses = (luck < means[:, None, None]).astype(float)
        for name, independent in (("documents", losses.mean(2)), ("prompts", losses.reshape(len(means), -1))):
            tests = zip(thresholds.tolist(), independent)
            actual = fixed_sequence_test(tests, tolerance=tolerance, confidence=confidence)
            passed = sum(test.certified for test in actual)
            wrong[name] += bool(passed and means[passed - 1] > tolerance)
    assert wrong["documents"] <= 200 * 0.1 + 2 * math.sqrt(200 * 0.1 * 0.9)
    assert wrong["prompts"] > 200 * 0.3


def test_likeness_in_numbers() -> None:
    """Of "the cat sat" and "the sat cat down" two words are in the same order, and three are in both."""
    assert rouge_l_distance("the cat sat", "the sat cat down") == pytest.approx(1 - 2 * 2 / 7)
    assert token_f1_distance("the cat sat", "the sat cat down") == pytest.approx(1 - 2 * 3 / 7)
    assert rouge_l_distance("a b", "a b") == 0.0
    assert rouge_l_distance("", "") == 0.0
    assert rouge_l_distance("a", "") == 1.0
    assert token_f1_distance("a a b", "a") == pytest.approx(1 - 2 / 4)
