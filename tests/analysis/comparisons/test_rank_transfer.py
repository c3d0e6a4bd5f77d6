"""Ranks of small tests: the same order, its reverse, ties, and cases that one of the results has not."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from manyformer.analysis.comparisons.suite_results import EQUAL_STEPS, SuiteRecord, read_results
from manyformer.base.errors import UserError
from manyformer.config.shipped import SUITE_RESULTS

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "rank_transfer.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("rank_transfer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(score: str, values: dict[str, list[float | None]], task: str = "copy") -> SuiteRecord:
    """A record with one task: the scores of each case by seed."""
    measured = [
        {"case": case, "seed": seed, "scores": [{score: value}]}
        for case, seeds in values.items()
        for seed, value in enumerate(seeds)
    ]
    column = {"best": None, "p_values": {}, "measured": measured}
    named = {"task": task, "score": score, "kinds": [], "lengths": [32], "floors": {}, "results": {EQUAL_STEPS: column}}
    record = {"name": "mine", "title": "Mine", "machine": "", "seeds": 2, "tasks": [named], "costs": {}}
    return SuiteRecord.model_validate(record, strict=False)


FIRST = results(
    "accuracy", {"a": [90.0, 92.0], "b": [80.0, 80.0], "c": [70.0, 71.0], "d": [60.0, 10.0], "e": [5.0, 5.0]}
)


def test_the_shipped_results_agree_with_themselves(script: Any) -> None:
    shipped = read_results(SUITE_RESULTS)
    transfers = script.rank_transfers(shipped, shipped)
    assert [row.task for row in transfers] == [task.task for task in shipped.tasks]
    for row in transfers:
        assert (row.spearman, row.kendall) == pytest.approx((1.0, 1.0))
        assert row.place == row.new_place


def test_places_of_losses_are_compared_with_places_of_accuracies(script: Any) -> None:
    # the second and the third change places: one pair of ten disagrees, and 1 - 6 * 2 / (5 * 24)
    second = results("loss", {"a": [0.1, 0.1], "b": [0.3, 0.3], "c": [0.2, 0.2], "d": [0.4, 0.4], "e": [0.5, 0.5]})
    (row,) = script.rank_transfers(FIRST, second)
    assert row.cases == 5
    assert (row.spearman, row.kendall) == pytest.approx((0.9, 0.8))
    assert (row.moved, row.place, row.new_place) == ("b", 2.0, 3.0)
    assert script.table_of([row])[-2].startswith("| copy | 5 | 0.90 |")


def test_a_case_without_all_seeds_has_no_place(script: Any) -> None:
    second = results("accuracy", {"a": [1.0, 1.0], "b": [2.0, 2.0], "c": [3.0, 3.0], "d": [9.0, None], "f": [9.0, 9.0]})
    (row,) = script.rank_transfers(FIRST, second)
    assert (row.cases, row.spearman) == (3, pytest.approx(-1.0))


def test_cases_that_are_all_equal_have_no_order(script: Any) -> None:
    (row,) = script.rank_transfers(FIRST, results("accuracy", {case: [100.0, 100.0] for case in "abcde"}))
    assert script.table_of([row])[-1].startswith("| copy | 5 | – | – | – |")


def test_results_without_a_task_in_common_are_refused(script: Any) -> None:
    with pytest.raises(UserError, match="share no task with at least 3 measured cases"):
        script.rank_transfers(FIRST, results("accuracy", {case: [1.0, 2.0] for case in "abc"}, task="needle"))
