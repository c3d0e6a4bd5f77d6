"""What a finished training is set beside: guesses without a model, and shipped curves of the same run."""

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from manyformer.analysis.baselines import DISCOUNT, meaning_of_scores, text_baselines
from manyformer.analysis.figures.curves import RunCurves
from manyformer.analysis.shipped_curves import curves_of_same_run, shipped_curves, table_beside
from manyformer.nn.batches import CausalLMBatch
from manyformer.training import TrainResult
from manyformer.training.run_folder import as_training_run

VOCABULARY = 7


def batch_of(*tokens: int) -> CausalLMBatch:
    row = torch.tensor([tokens])
    return CausalLMBatch(row[:, :-1], row[:, 1:])


class Feed:
    """Training batches that are read once."""

    def __init__(self, *batches: CausalLMBatch) -> None:
        self.batches = len(batches)
        self._rest = iter(batches)

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> CausalLMBatch:
        return next(self._rest)


def data_of(*batches: CausalLMBatch) -> Any:
    return SimpleNamespace(train=Feed(*batches), vocab=VOCABULARY, valid=SimpleNamespace(units=None))


def test_baselines_of_tokens_are_those_of_counts_made_by_hand() -> None:
    counted = [1, 2, 1, 3, 1, 2, 2, 4]
    held_out = [1, 2, 4, 5, 1, 6, 1]
    measured = text_baselines(data_of(batch_of(*counted)), [batch_of(*held_out)])
    targets = Counter(counted[1:])
    pairs = Counter(pairwise(counted))
    first = Counter(counted[:-1])

    def unigram(token: int) -> float:
        return (targets[token] + 1) / (len(counted) - 1 + VOCABULARY)

    def bigram(context: int, token: int) -> float:
        if not first[context]:
            return unigram(token)
        successors = len({pair for pair in pairs if pair[0] == context})
        return (max(pairs[context, token] - DISCOUNT, 0) + DISCOUNT * successors * unigram(token)) / first[context]

    scored = list(pairwise(held_out))
    assert measured.unigram == pytest.approx(-sum(math.log(unigram(token)) for _, token in scored) / len(scored))
    assert measured.bigram == pytest.approx(-sum(math.log(bigram(*pair)) for pair in scored) / len(scored))


@pytest.mark.parametrize("context", range(VOCABULARY))
def test_the_probabilities_of_all_successors_add_up_to_one(context: int) -> None:
    """Otherwise the baseline would be no code of the text, and a model could not be compared with it."""
    counted = batch_of(1, 2, 1, 3, 1, 2, 2, 4, 0, 0, 1)
    losses = [text_baselines(data_of(counted), [batch_of(context, token)]).bigram for token in range(VOCABULARY)]
    assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1)


def test_a_loss_above_that_of_pairs_is_called_so(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog lay by the door\n" * 300)
    settings = [f"data.path={text}", "data.tokenizer=char", "data.length=32", "batch.tokens=256"]
    run = as_training_run("transformer-lm", settings)
    poor = meaning_of_scores(run, TrainResult(tmp_path, 1, "", "", {"loss": 9.0}))
    good = meaning_of_scores(run, TrainResult(tmp_path, 1, "", "", {"loss": 0.1}))
    assert "train it longer" in poor
    assert "train it longer" not in good
    # every second character of a repeated line is counted from the one before, and xz needs next to nothing
    assert good.startswith("0.14 bits for each byte")


def test_a_classifier_that_is_no_better_than_the_most_frequent_label_is_called_so(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("label,text\n" + "".join(f"{'ab'[n % 4 == 0]},red cat {n}\n" for n in range(400)))
    run = as_training_run("classify/intents", [f"data.path={table}", "data.tokenizer=byte", "data.vocab=null"])
    poor = meaning_of_scores(run, TrainResult(tmp_path, 1, "", "", {"accuracy": 0.7}))
    good = meaning_of_scores(run, TrainResult(tmp_path, 1, "", "", {"accuracy": 0.99}))
    assert "learned nothing yet" in poor
    assert "learned nothing yet" not in good
    assert "99.0% of " in good


def test_shipped_curves_stand_beside_the_same_run_alone() -> None:
    def seeds(*settings: str) -> list[int]:
        return [curve.seed for curve in curves_of_same_run(as_training_run("lm/stdlib", list(settings)))]

    # a first run has the seed of the file, and would be compared with itself
    assert as_training_run("lm/stdlib").seed not in seeds()
    assert len(seeds()) > 1
    assert seeds("seed=7", "limits.minutes=1", "out=elsewhere", "log.every=5") == seeds()
    for other in ("data.path=book.txt", "dim=64", "optim.lr=0.001", "batch.tokens=1024", "evaluate.batches=3"):
        assert not seeds(other), other


def test_a_run_that_its_time_has_ended_stands_in_a_row_of_its_own() -> None:
    run = RunCurves("run", [{"step": 200, "valid_bits_per_byte": 2.5}, {"step": 300, "valid_bits_per_byte": 2.0}])
    rows = {line.split()[0]: line.split()[1:] for line in list(table_beside(shipped_curves(), run))[1:]}
    assert rows["300"] == ["2.000", "–", "–", "–"]
    assert rows["200"][0] == "2.500"
    own, mean, lowest, highest = rows["1,200"]
    assert own == "–"
    assert float(lowest) <= float(mean) <= float(highest)


def test_shipped_curves_reach_the_last_step_of_their_run() -> None:
    for curve in shipped_curves():
        steps = cast(int, as_training_run(curve.run).limits.steps)
        assert curve.rows[-1]["step"] == steps
        assert "valid_bits_per_byte" in curve.rows[-1]
