"""Advice beyond suites: what it rests on is what the documentation says, and what was not measured is said."""

import subprocess
import sys
from pathlib import Path

import pytest

import manyformer as mf
from manyformer.analysis.comparisons.advise import recipe_tasks, state_at
from manyformer.analysis.comparisons.measured_rows import (
    ScoredComparison,
    ScoredRecipe,
    scored_comparisons,
    state_by_growth,
    step_times,
)
from manyformer.analysis.comparisons.suite_report import state_bytes_at
from manyformer.analysis.comparisons.suite_results import read_results
from manyformer.base.errors import UserError
from manyformer.config.shipped import SUITE_RESULTS

DOCS = Path(__file__).parents[3] / "docs"
LENGTH = 16_000


@pytest.mark.parametrize("comparison", scored_comparisons(), ids=lambda one: one.of)
def test_every_quoted_score_stands_on_its_page(comparison: ScoredComparison) -> None:
    page = (DOCS / comparison.page).read_text(encoding="utf-8")
    if comparison.page == "gpu-results.md":
        page = page.replace("5.215e+05", "521500")
    for row in comparison.rows:
        assert row.recipe in mf.recipes()
        assert f"{row.value:g}" in page or f"{row.value:.3f}" in page, row
        assert not row.spread or f"± {row.spread:g}" in page or f"± {row.spread:.3f}" in page or row.spread == 1, row


@pytest.mark.parametrize("task", recipe_tasks())
def test_every_task_of_a_recipe_is_answered_by_recipes_of_rows_or_by_what_was_not_measured(task: str) -> None:
    advice = mf.advise(task=task, length=500)
    assert 1 <= len(advice.candidates) <= 3
    assert len({one.recipe for one in advice.candidates}) == len(advice.candidates)
    for one in advice.candidates:
        unmeasured = "was measured" in one.reason
        assert (one.row is None) <= unmeasured, one
        assert all(row.recipe == one.recipe for row in one.rows)
        assert all(row.source for row in one.rows)
    if not any(one.row for one in advice.candidates):
        assert f"no score was measured for {task}" in " ".join(advice.limits)


def test_encoders_and_encoder_decoders_rest_on_measured_rows() -> None:
    readers = mf.advise(task="masked-lm", length=1400)
    assert readers.candidates[0].recipe == "longformer"
    assert readers.candidates[0].row == readers.rows[0]
    assert readers.rows[0].value == "81.3 ± 0.5 %"
    translators = mf.advise(task="translation", length=20)
    assert [one.recipe for one in translators.candidates[:2]] == ["transformer", "bahdanau"]
    # a recurrence and graphs, too
    assert mf.advise(task="policy").candidates[1].row == mf.advise(task="policy").rows[1]
    assert mf.advise(task="graph-nodes").candidates[0].rows[0].value == "83.07 ± 0.68 %"


def test_a_row_is_best_where_no_other_is_better_by_more_than_both_deviations() -> None:
    rows = (
        ScoredRecipe(recipe="vit", value=90.0, spread=1.0),
        ScoredRecipe(recipe="mlp-mixer", value=92.5, spread=1.0),
        ScoredRecipe(recipe="gmlp-vit", value=91.0, spread=1.0),
    )
    words = {"task": "image-classification", "of": "digits", "measure": "x", "page": "", "command": "", "seeds": 3}
    more = ScoredComparison(**words, rows=rows)
    assert [more.is_best(row) for row in rows] == [False, True, True]
    assert more.places() == {"mlp-mixer": 1, "gmlp-vit": 2, "vit": 3}
    less = ScoredComparison(**words, rows=rows, lower_is_better=True)
    assert [less.is_best(row) for row in rows] == [True, False, True]


def test_budgets_leave_out_what_does_not_fit_and_say_why() -> None:
    whole = mf.advise(length=LENGTH, task="recall")
    small = mf.advise(length=LENGTH, task="recall", memory=1_000_000)
    assert not whole.excluded
    assert small.excluded["transformer-lm"] == "its state takes 16,896,016 bytes at length 16,000"
    assert all(row.state_bytes is not None and row.state_bytes <= 1_000_000 for row in small.rows)
    quick = mf.advise(length=20, task="translation", minutes=2.6)
    assert quick.candidates[0].recipe == "transformer"
    assert quick.excluded == {"bahdanau": "its measured training took 3.0 minutes"}
    nothing = mf.advise(length=LENGTH, task="recall", memory=10)
    assert nothing.candidates == ()
    assert set(nothing.excluded) == {row.case for row in whole.rows}


def test_a_device_bounds_the_parameters_and_says_what_was_not_measured_on_it() -> None:
    limits = " ".join(mf.advise(length=100, parameters=20_000_000, device="RTX-4070 12 GB").limits)
    assert "no row was measured on rtx-4070" in limits
    assert "no row has 20,000,000 parameters" in limits
    assert "no row was measured on" not in " ".join(mf.advise(length=100, device="h200").limits)
    for words, message in (
        ({"device": "rtx-4070"}, "how much memory it has is not known"),
        (
            {"device": "h100", "parameters": 6_000_000_000},
            "alone take 96 GB, and h100 has 80: give at most 5,000,000,000",
        ),
        ({"minutes": 0.0}, r"--minutes \(0.0\) must be greater than 0"),
        ({"minutes": float("nan")}, r"--minutes \(nan\) must be greater than 0"),
        ({"task": "translatoin"}, "did you mean translation"),
    ):
        with pytest.raises(UserError, match=message):
            mf.advise(length=100, **words)
    with pytest.raises(UserError, match="advise needs --length"):
        mf.advise(task="masked-lm")


def test_minutes_of_a_processor_are_tokens_at_the_measured_speed() -> None:
    first = mf.advise(length=1024, minutes=10, task="needle").candidates[0]
    costs = read_results(SUITE_RESULTS).costs[first.row.case]  # type: ignore[union-attr]
    seconds = costs.at(1024).step_seconds  # type: ignore[union-attr]
    assert seconds is not None
    assert first.limits == (f"10 minutes of a CPU's thread are at most {600 / seconds * 1024 / 1e6:,.1f} M tokens",)


def test_a_state_grows_by_equal_steps_or_not_at_all() -> None:
    assert state_by_growth({256: 512, 1024: 2048}, 4096, grows=True) == 8192
    assert state_by_growth({256: 100, 1024: 100}, 4096, grows=False) == 100
    # a window that was not full at the two lengths
    assert state_by_growth({256: 512, 1024: 2048}, 4096, grows=False) is None
    assert state_by_growth({256: 100, 1024: 100}, 64, grows=False) is None
    assert state_by_growth({256: None}, 4096, grows=True) is None


@pytest.mark.thinned(9)
@pytest.mark.parametrize("case", sorted(read_results(SUITE_RESULTS).costs))
def test_the_state_by_its_growth_is_that_of_the_model(case: str) -> None:
    costs = read_results(SUITE_RESULTS).costs[case]
    built = state_bytes_at(costs.recipe, costs.keywords, 2000)
    # how many tokens a layer chooses depends on their content
    tolerance = 0.01 if case == "mixture-of-depths" else 0
    assert state_at(costs, 2000) == (built if built is None else pytest.approx(built, rel=tolerance))


def test_step_times_are_positive_and_grow_with_the_length() -> None:
    steps = {(step.recipe, step.length): step.seconds for step in step_times().steps}
    assert {mf.recipes()[recipe].card.task.name for recipe, _ in steps} == {
        "masked-lm",
        "translation",
        "classification",
    }
    assert all(0 < seconds < steps.get((recipe, 4 * length), 1e9) for (recipe, length), seconds in steps.items())


def test_advice_needs_no_torch() -> None:
    code = """import sys
import manyformer as mf
mf.advise(task="translation", length=60)
mf.advise(length=2000)
print("torch" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
