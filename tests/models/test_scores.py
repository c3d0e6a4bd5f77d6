"""Scores against hand-made numbers, brute force, and sacrebleu itself."""

import math
import random
import re
import sys

import numpy as np
import pytest

from manyformer.base.errors import UserError
from manyformer.models.scores import (
    ScoreRecord,
    accuracy,
    bits_per_byte,
    bits_per_character,
    bleu,
    character_error_rate,
    chrf,
    exact_match,
    f1,
    is_comparable,
    mean_length,
    mean_return,
    perplexity,
    rank_key,
    success_rate,
    ter,
    token_accuracy,
    word_error_rate,
)
from manyformer.nn.ops.ctc import edit_distance

TEXTS = ["the cat sat on the mat .", "it is raining !", "no"]
REFERENCES = ["the cat sat on a mat .", "it rains !", "no"]
TRANSCRIPTS = ["one two two", "", "seven eight", "nine"]
SPOKEN = ["one two three", "four", "seven eight", "five nine ten"]


def test_likelihoods_by_hand() -> None:
    # a fair die thrown ten times
    assert perplexity(10 * math.log(6), 10).value == pytest.approx(6)
    assert perplexity(10 * math.log(6), 10).parts["nats"] == pytest.approx(math.log(6))
    assert bits_per_byte(800 * math.log(2), 100).value == pytest.approx(8)
    assert bits_per_character(800 * math.log(2), 50).value == pytest.approx(16)
    assert token_accuracy(3, 4).value == 75
    assert perplexity(1e6, 1).value == math.inf
    assert str(bits_per_byte(100, 100)) == "bits per byte 1.4427 (per:byte|bytes:100)"


def brute_f1(found: list[int], wanted: list[int], classes: list[int]) -> tuple[dict[str, float], float, float]:
    each, sums = {}, [0, 0, 0]
    for c in classes:
        hit = sum(a == c and b == c for a, b in zip(found, wanted))
        false = sum(a == c and b != c for a, b in zip(found, wanted))
        missed = sum(a != c and b == c for a, b in zip(found, wanted))
        precision = hit / (hit + false) if hit + false else 0.0
        recall = hit / (hit + missed) if hit + missed else 0.0
        each[str(c)] = 200 * precision * recall / (precision + recall) if precision + recall else 0.0
        sums = [old + new for old, new in zip(sums, (hit, false, missed))]
    hit, false, missed = sums
    micro = 200 * hit / (2 * hit + false + missed) if hit + false + missed else 0.0
    return each, sum(each.values()) / len(each), micro


def test_f1_by_brute_force() -> None:
    draw = random.Random(1)
    for _ in range(200):
        size = draw.randint(1, 15)
        actual, expected = draw.choices(range(4), k=size), draw.choices(range(3), k=size)
        for classes in (None, [0, 1, 2, 3], [1, 2]):
            names = sorted({*actual, *expected}) if classes is None else classes
            each, macro, micro = brute_f1(actual, expected, names)
            assert f1(actual, expected, classes=classes).value == pytest.approx(macro)
            assert f1(actual, expected, classes=classes).parts == pytest.approx(each)
            assert f1(actual, expected, average="micro", classes=classes).value == pytest.approx(micro)
        # over all classes the micro average is the accuracy
        assert f1(actual, expected, average="micro").value == pytest.approx(accuracy(actual, expected).value)


def test_f1_by_hand() -> None:
    # yes: precision 2/3, recall 2/2; no: precision 1/1, recall 1/2
    actual, expected = ["yes", "yes", "yes", "no"], ["yes", "yes", "no", "no"]
    score = f1(actual, expected)
    assert score.parts == pytest.approx({"yes": 80, "no": 200 / 3})
    assert score.value == pytest.approx((80 + 200 / 3) / 2)
    assert score.signature == "average:macro|classes:2|items:4"
    assert accuracy(actual, expected).value == 75


def test_text_scores_are_sacrebleus() -> None:
    import sacrebleu

    assert bleu(TEXTS, REFERENCES).value == sacrebleu.corpus_bleu(TEXTS, [REFERENCES]).score
    assert chrf(TEXTS, REFERENCES).value == sacrebleu.corpus_chrf(TEXTS, [REFERENCES]).score
    assert chrf(TEXTS, REFERENCES, word_order=2).value == sacrebleu.corpus_chrf(TEXTS, [REFERENCES], word_order=2).score
    assert ter(TEXTS, REFERENCES).value == sacrebleu.corpus_ter(TEXTS, [REFERENCES]).score
    several = [REFERENCES, TEXTS]
    assert bleu(TEXTS, several).value == sacrebleu.corpus_bleu(TEXTS, several).score == pytest.approx(100)


def test_bleu_by_hand() -> None:
    # 6 tokens: 5, 3, 2 and 1 of their n-grams are in the reference of equal length
    score = bleu(["a b c d x e"], ["a b c d y e"], tokenize="none")
    precisions = [5 / 6, 3 / 5, 2 / 4, 1 / 3]
    assert score.value == pytest.approx(100 * math.prod(precisions) ** 0.25)
    assert list(score.parts.values()) == pytest.approx([100 * p for p in precisions])


@pytest.mark.parametrize(
    ("score", "name", "parts"),
    [
        (bleu(TEXTS, REFERENCES), "BLEU", ["nrefs:1", "case:mixed", "tok:13a", "smooth:exp"]),
        (bleu(TEXTS, REFERENCES, tokenize="none", lowercase=True), "BLEU", ["case:lc", "tok:none"]),
        (bleu(TEXTS, [REFERENCES, TEXTS], tokenize="char"), "BLEU", ["nrefs:2", "tok:char"]),
        (chrf(TEXTS, REFERENCES), "chrF", ["nc:6", "nw:0"]),
        (chrf(TEXTS, REFERENCES, word_order=2), "chrF++", ["nw:2"]),
        (ter(TEXTS, REFERENCES), "TER", ["case:lc", "tok:tercom"]),
    ],
)
def test_signatures_say_how(score: ScoreRecord, name: str, parts: list[str]) -> None:
    assert {*parts} <= {*score.signature.split("|")}
    assert re.search(r"\|version:\d", score.signature)
    assert str(score) == f"{name} {score.value:.2f} ({score.signature})"


def test_tokenised_text_is_scored_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    bleu(["a b c d ."] * 200, ["a b c d ."] * 200, tokenize="none")
    assert not caplog.records


def test_exact() -> None:
    assert exact_match(["1998-03-03", "x"], ["1998-03-03", "y"]).value == 50


@pytest.mark.parametrize("score", [accuracy, f1, bleu, chrf, ter, exact_match])
def test_nothing_and_unequal_lengths(score: object) -> None:
    assert callable(score)
    with pytest.raises(ValueError, match=r"there are no (texts|predictions) to score"):
        score([], [])
    with pytest.raises(ValueError, match=r"2 (texts|predictions) cannot be scored against 1 references"):
        score(["a", "b"], ["a"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: perplexity(1.0, 0), "there is no token to score"),
        (lambda: bits_per_byte(1.0, 0), "there is no byte to score"),
        (lambda: token_accuracy(5, 4), "correct must be from 0 to the 4 tokens, got 5"),
        (lambda: bleu(["a"], [["a"], ["a", "b"]]), "1 texts cannot be scored against 2 references"),
        (lambda: bleu(["a"], ["a"], tokenize="klingon"), "tokenize must be one of .*13a.*, got 'klingon'"),
        (lambda: chrf(["a"], ["a"], word_order=-1), "word_order must be 0"),
        (lambda: f1([1], [1], average="mean"), "average must be 'macro' or 'micro', got 'mean'"),  # type: ignore[arg-type]
        (lambda: f1([1], [1], classes=[]), "there are no classes"),
    ],
)
def test_mistakes_are_told(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_without_sacrebleu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("sacrebleu")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"need sacrebleu: pip install 'manyformer\[translate\]'"):
        bleu(["a"], ["a"])


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


def test_error_rates_are_edits_over_the_length_of_all_references() -> None:
    word_edits = sum(edit_distance(text.split(), reference.split()) for text, reference in zip(TRANSCRIPTS, SPOKEN))
    words = word_error_rate(TRANSCRIPTS, SPOKEN)
    assert words.value == pytest.approx(100 * word_edits / 9)
    assert sum(words.parts.values()) == pytest.approx(words.value)
    character_edits = sum(edit_distance(text, reference) for text, reference in zip(TRANSCRIPTS, SPOKEN))
    characters = character_error_rate(TRANSCRIPTS, SPOKEN)
    assert characters.value == pytest.approx(100 * character_edits / sum(map(len, SPOKEN)))
    assert characters.parts["deletions"] > characters.parts["insertions"]


def test_a_rate_above_100_and_input_without_one() -> None:
    assert word_error_rate(["a b c"], ["d"]).value == 300
    with pytest.raises(UserError, match="no words"):
        word_error_rate(["a"], [" "])
    with pytest.raises(UserError, match="1 transcripts cannot be scored against 2"):
        character_error_rate(["a"], ["b", "c"])


@pytest.mark.parametrize("lower_is_better", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_what_cannot_be_compared_comes_last(bad: float | None, lower_is_better: bool) -> None:
    assert not is_comparable(bad)
    scores = [bad, 3.0, -2.0]
    ranked = sorted(scores, key=lambda score: rank_key(score, lower_is_better=lower_is_better))
    assert ranked[:2] == ([-2.0, 3.0] if lower_is_better else [3.0, -2.0])
