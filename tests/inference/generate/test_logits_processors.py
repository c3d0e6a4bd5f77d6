"""Each change of logits against its definition by brute force, and against the processors of transformers."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.inference.generate import (
    BanTokensProcessor,
    Decoding,
    LogitsProcessor,
    MinPProcessor,
    NoRepeatNGramProcessor,
    RepetitionPenaltyProcessor,
    SourceLengthLimit,
    TemperatureProcessor,
    TopKProcessor,
    TopPProcessor,
)
from manyformer.models.model_files import GenerationSettings

NONE = torch.zeros(1, 0, dtype=torch.long)


def kept(shaping: LogitsProcessor, logits: Tensor) -> list[list[int]]:
    """The tokens of each row that stay possible; the logits of those must be as they were."""
    shaped = shaping(logits, NONE)
    assert torch.equal(shaped.where(shaped.isfinite(), logits), logits)
    return [row.isfinite().nonzero()[:, 0].tolist() for row in shaped]


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9, 0.999])
def test_top_p_is_the_smallest_likely_set_that_reaches_p(p: float) -> None:
    logits = torch.randn(50, 12) * 2
    for row, actual in zip(logits.softmax(-1).tolist(), kept(TopPProcessor(p), logits)):
        order = sorted(range(12), key=row.__getitem__, reverse=True)
        size = next(n for n in range(1, 13) if sum(row[i] for i in order[:n]) >= p)
        assert sorted(order[:size]) == actual


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_is_relative_to_the_likeliest(p: float) -> None:
    logits = torch.randn(50, 12) * 2
    for row, actual in zip(logits.softmax(-1).tolist(), kept(MinPProcessor(p), logits)):
        assert actual == [i for i in range(12) if row[i] >= p * max(row)]


@pytest.mark.parametrize("k", [1, 3, 12, 100])
def test_top_k_keeps_k(k: int) -> None:
    logits = torch.randn(50, 12)
    for row, actual in zip(logits.tolist(), kept(TopKProcessor(k), logits)):
        assert actual == sorted(sorted(range(12), key=row.__getitem__, reverse=True)[:k])


def test_top_k_keeps_ties() -> None:
    assert kept(TopKProcessor(2), torch.tensor([[1.0, 3.0, 1.0, 0.0]])) == [[0, 1, 2]]


def test_no_repeat_by_brute_force() -> None:
    for n, length in itertools.product((1, 2, 3, 4), (1, 2, 3, 20)):
        history = torch.randint(0, 3, (20, length))
        shaped = NoRepeatNGramProcessor(n)(torch.zeros(20, 3), history)
        for row, actual in zip(history.tolist(), shaped.isfinite().tolist()):
            grams = [tuple(row[i : i + n]) for i in range(length - n + 1)]
            begun = tuple(row[len(row) - n + 1 :]) if n > 1 else ()
            assert actual == [len(row) < n - 1 or (*begun, token) not in grams for token in range(3)]


@pytest.mark.parametrize(
    "shaping",
    [RepetitionPenaltyProcessor(1.7), NoRepeatNGramProcessor(1), NoRepeatNGramProcessor(2), NoRepeatNGramProcessor(3)],
)
def test_padding_is_no_history(shaping: LogitsProcessor) -> None:
    rows = [[0, 2, 0, 2, 0], [1], [3, 3], [2, 0, 0]]
    logits = torch.randn(len(rows), 5)
    padded = torch.tensor([[-1] * (5 - len(row)) + row for row in rows])
    together = shaping(logits, padded)
    for number, row in enumerate(rows):
        alone = shaping(logits[number : number + 1], torch.tensor([row]))
        assert torch.equal(together[number], alone[0])


def test_ban_forbids_and_changes_nothing_else() -> None:
    logits = torch.randn(3, 6)
    assert kept(BanTokensProcessor((0, 4)), logits) == [[1, 2, 3, 5]] * 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TemperatureProcessor(0.0), "temperature must be a number above 0, got 0.0"),
        (lambda: TemperatureProcessor(math.inf), "above 0, got inf"),
        (lambda: TemperatureProcessor(math.nan), "above 0, got nan"),
        (lambda: TopKProcessor(0), "top_k must be 1 or more, got 0"),
        (lambda: TopPProcessor(0.0), "top_p must be above 0 and at most 1, got 0.0"),
        (lambda: TopPProcessor(1.5), "top_p must be above 0 and at most 1, got 1.5"),
        (lambda: MinPProcessor(-0.1), "min_p must be above 0 and at most 1, got -0.1"),
        (lambda: RepetitionPenaltyProcessor(0.0), "repetition_penalty must be above 0"),
        (lambda: NoRepeatNGramProcessor(0), "no_repeat_ngram must be 1 or more, got 0"),
        (
            lambda: BanTokensProcessor((7,)).prepare(5, torch.device("cpu")),
            "cannot ban token 7: the model's tokens are 0 to 4",
        ),
    ],
)
def test_values_out_of_range(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("ours", "name", "arguments"),
    [
        (TemperatureProcessor(0.7), "TemperatureLogitsWarper", {"temperature": 0.7}),
        (TopKProcessor(5), "TopKLogitsWarper", {"top_k": 5}),
        (TopPProcessor(0.85), "TopPLogitsWarper", {"top_p": 0.85}),
        (MinPProcessor(0.1), "MinPLogitsWarper", {"min_p": 0.1}),
        (RepetitionPenaltyProcessor(1.3), "RepetitionPenaltyLogitsProcessor", {"penalty": 1.3}),
        (RepetitionPenaltyProcessor(0.6), "RepetitionPenaltyLogitsProcessor", {"penalty": 0.6}),
        (NoRepeatNGramProcessor(1), "NoRepeatNGramLogitsProcessor", {"ngram_size": 1}),
        (NoRepeatNGramProcessor(2), "NoRepeatNGramLogitsProcessor", {"ngram_size": 2}),
        (NoRepeatNGramProcessor(3), "NoRepeatNGramLogitsProcessor", {"ngram_size": 3}),
    ],
)
def test_transformers_does_the_same(ours: LogitsProcessor, name: str, arguments: dict[str, float]) -> None:
    from transformers.generation import logits_process

    reference = getattr(logits_process, name)(**arguments)
    for length in (1, 2, 7, 30):
        history, logits = torch.randint(0, 15, (64, length)), torch.randn(64, 15) * 3
        expected = reference(history, logits.clone())
        torch.testing.assert_close(ours(logits.clone(), history), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("beam", [None, 2])
def test_forced_tokens_stand_first_and_last(beam: int | None) -> None:
    model: Any = mf.build("transformer", vocab=12, dim=8, depth=1, heads=1)
    model.generation = GenerationSettings(start=1, pad=0, stop_ids=(2,), banned_ids=(2,), forced_first=7, forced_last=9)
    # several lengths in one batch: each text ends at its own limit
    sources = [[5, 6, 3], [4]]
    answers = mf.generate(model, sources, beam=beam, max_new=4).rows + mf.generate(model, sources, max_new=1).rows
    assert [(answer.tokens[0], answer.tokens[-1], len(answer.tokens)) for (answer,) in answers[:2]] == [(7, 9, 4)] * 2
    assert [answer.tokens for (answer,) in answers[2:]] == [[9]] * 2
    texts = mf.generate(model, sources, decoding=Decoding(max_new=SourceLengthLimit(2))).rows
    assert [(answer.tokens[-1], len(answer.tokens)) for (answer,) in texts] == [(9, 5), (9, 3)]
