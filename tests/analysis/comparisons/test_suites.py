"""Suites: tasks times cases of equal size, trials, budgets, floors, significance, and an archive that travels."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scipy import stats

from manyformer.analysis.comparisons.advise import advise
from manyformer.analysis.comparisons.claims import holm_adjusted, paired_t_test, student_t_tails
from manyformer.analysis.comparisons.comparison_report import spell_duration
from manyformer.analysis.comparisons.planner import PlannedCase, TrainingPlan, TrainingTiming, with_budget
from manyformer.analysis.comparisons.sizing import TOLERANCE, body_parameters
from manyformer.analysis.comparisons.suite_report import SuiteResult
from manyformer.analysis.comparisons.suite_results import EQUAL_STEPS, find_results, read_results
from manyformer.analysis.comparisons.suite_runner import (
    SuiteOptions,
    fitting_recipes,
    read_suite,
    run_suite,
)
from manyformer.analysis.comparisons.training_task import open_archive
from manyformer.base.errors import UserError, UserErrors
from manyformer.base.files.json_records import DamagedFile
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.recipes import RECIPES

FILE = """# Which is best?
title: Tiny
reference: transformer-lm
seeds: 2
trials: {optim.lr: [1.0e-9, 0.01]}
lengths: [16]
run:
  model: {dim: 16, depth: 1, heads: 2, max_length: 32}
  data: {kind: synthetic, symbols: 6, length: 16, valid: 512}
  batch: {tokens: 256}
  limits: {steps: 12}
  evaluate: {every: null}
cases:
  transformer-lm: {}
  linear: {recipe: linear-transformer}
tasks:
  markov:
    floors: {guessing: 16.7}
    expectation: nothing published
    kinds: state
    claims: [transformer-lm >= 0]
  duplicate:
    score: [loss, accuracy]
    run: {data: {rule: duplicate}}
    sweep: {data.length: [16, 32, 64]}
"""


@pytest.fixture(autouse=True)
def short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans need not be exact here: in this process steps are timed as briefly as possible."""
    monkeypatch.setattr("manyformer.analysis.comparisons.planner.MIN_SECONDS", 0.0)


def written(folder: Path, text: str = FILE) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def finished_suite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SuiteResult, list[str]]:
    """The suite carried out once with two processes: its folder, its result and its log."""
    folder = tmp_path_factory.mktemp("suite")
    log: list[str] = []
    suite = read_suite(written(folder))
    return folder, run_suite(suite, SuiteOptions(jobs=2), out=folder / "out", log=log.append), log


def scores(result: SuiteResult) -> dict[tuple[str, str, int], object]:
    """All scores by task, case and seed."""
    return {
        (task.task.name, m.case, m.seed): (m.trial, m.scores)
        for task in result.tasks
        for m in task.results[EQUAL_STEPS].measurements
    }


def test_every_case_meets_every_task_with_its_best_trial(finished_suite: tuple[Path, SuiteResult, list[str]]) -> None:
    folder, result, log = finished_suite
    assert sorted(scores(result)) == sorted(
        (task, case, seed)
        for task in ("markov", "duplicate")
        for case in ("transformer-lm", "linear")
        for seed in (0, 1)
    )
    # nothing is learned with a rate of 1e-9, so the other trial is the best
    assert {trial for trial, _ in scores(result).values()} == {"optim.lr 0.01"}
    assert log[0].startswith("this takes ")
    assert log[0].endswith("on 2 jobs: 12 trainings")
    assert log[-1].endswith("12 of 12 trained")
    assert result.missing == 0
    assert not list((folder / "out/trainings").glob("*")), "trainings leave nothing but their measurements"


def test_tables_have_ranges_floors_costs_and_claims(finished_suite: tuple[Path, SuiteResult, list[str]]) -> None:
    folder, result, _ = finished_suite
    table, costs, *others = result.tables
    assert [other.headers for other in others] == [["case", "parameters", "at 16"]] * 4
    assert table.headers == ["case", "markov", "duplicate"]
    values = result.tasks[0].results[EQUAL_STEPS].values("linear", "accuracy")
    cell = table.rows[1][1].removesuffix(" *")
    assert cell == f"{sum(values) / 2:.2f} ({min(values):.2f}-{max(values):.2f})"
    guesses = result.tasks[0].guesses
    assert guesses is not None
    assert table.rows[2:] == [
        ["baseline: guessing", "16.7", "–"],
        ["baseline: majority", f"{guesses.majority.accuracy:.3g}", "–"],
        ["baseline: best shortcut", f"{guesses.shortcut.accuracy:.3g}", "–"],
    ]
    # a chain of order two
    assert guesses.shortcut.name in ("last 2 symbols", "last 3 symbols")
    assert guesses.shortcut.accuracy > guesses.majority.accuracy
    assert costs.rows[0][0] == "transformer-lm"
    # two layers of keys and values in float32: 2 x 16 tokens x 16 numbers x 4 bytes, and their positions
    assert 2.0 < float(costs.rows[0][2]) < 2.7
    markdown = (folder / "out/table.md").read_text()
    assert "- markov: claim holds: transformer-lm >= 0" in markdown
    assert "- markov: nothing published" in markdown
    assert "- duplicate: transformer-lm at data.length 64: it was built for 32 positions, but there are 64" in markdown
    record = json.loads((folder / "out/results.json").read_text())
    assert list(record["tasks"][0]["floors"]) == ["guessing", "majority", "best shortcut"]
    assert record["tasks"][1]["floors"] == {}
    assert len(record["tasks"][1]["results"][EQUAL_STEPS]["trials"]) == 4
    for name in ("state", "seconds", "length"):
        assert (folder / f"out/{name}.png").stat().st_size > 10_000


@pytest.mark.slow
def test_measurements_travel_and_one_more_recipe_costs_one_more(
    finished_suite: tuple[Path, SuiteResult, list[str]], tmp_path: Path
) -> None:
    folder, result, _ = finished_suite
    for name in ("measurements.jsonl", "timings.jsonl", "costs.jsonl"):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        shutil.copy(folder / "out" / name, tmp_path / "elsewhere" / name)
    log: list[str] = []
    suite = read_suite(folder / "tiny.yaml", chosen=["transformer-lm", "linear", "alibi"])
    more = run_suite(suite, SuiteOptions(), out=tmp_path / "elsewhere", log=log.append)
    assert log[0].endswith("on 1 job: 6 trainings")
    assert {case for _, case, _ in scores(more)} == {"transformer-lm", "linear", "alibi"}
    earlier = scores(result)
    assert {key: value for key, value in scores(more).items() if key in earlier} == earlier


@pytest.mark.slow
def test_the_same_seed_gives_the_same_table_after_a_kill(
    finished_suite: tuple[Path, SuiteResult, list[str]], tmp_path: Path
) -> None:
    folder, result, _ = finished_suite
    command = [sys.executable, "-m", "manyformer", "compare", str(folder / "tiny.yaml"), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
    archive = tmp_path / "out/measurements.jsonl"
    started = time.monotonic()
    while not archive.exists() or archive.read_text().count("\n") < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - started < 300
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with archive.open("a") as file:
        file.write('{"key": "cut off')
    again = run_suite(read_suite(folder / "tiny.yaml"), SuiteOptions(), out=tmp_path / "out")
    assert scores(again) == scores(result)
    assert len(open_archive(archive).entries) == 12


def test_advice_quotes_rows_and_says_where_they_end(finished_suite: tuple[Path, SuiteResult, list[str]]) -> None:
    folder, result, _ = finished_suite
    advice = advise(results=folder / "out", length=16_000, task="duplicate")
    means = {case: result.tasks[1].results[EQUAL_STEPS].mean(case, "loss") for case in result.cases}
    # the score is the loss: less is better
    assert [row.case for row in advice.rows] == sorted(means, key=lambda case: means[case] or 0)
    assert [row.score for row in advice.rows] == [means[row.case] for row in advice.rows]
    states = {row.case: row.state_bytes or 0 for row in advice.rows}
    # keys and values of one layer in float32, at every length; a memory has one size
    assert 2 * 16_000 * 16 * 4 <= states["transformer-lm"] < 3 * 16_000 * 16 * 4
    assert states["linear"] < 4096
    assert any("of quality at 16,000 the rows say nothing" in limit for limit in advice.limits)
    frugal = advise(results=folder / "out", length=16_000, task="state", memory=100_000)
    assert [row.case for row in frugal.rows] == ["linear"]
    assert list(frugal.excluded) == ["transformer-lm"]
    with pytest.raises(UserError, match=r"has no task 'recal'; .*markov"):
        advise(results=folder / "out", length=16, task="recal")


@pytest.mark.slow
def test_advice_without_a_suite_of_ones_own_rests_on_the_shipped_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    suite = read_results(find_results())
    shipped = read_suite("suite/full", chosen=list(suite.costs))
    assert [task.task for task in suite.tasks] == [task.name for task in shipped.tasks]
    assert len(suite.costs) >= 14
    advice = advise(length=16_000, task="recall", memory=10_000_000)
    assert set(advice.excluded) >= {"transformer-lm", "gmlp"}
    assert advice.rows[0].case == "transformer-xl"
    # a suite of one's own comes first
    (tmp_path / "comparisons/suite-quick").mkdir(parents=True)
    (tmp_path / "comparisons/suite-quick/results.json").write_text("{}")
    assert find_results() == Path("comparisons/suite-quick")


@pytest.mark.parametrize("text", ["{}", "[]", "", '{"name": 3}'])
def test_hostile_results_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(DamagedFile, match=r"results\.json is damaged"):
        read_results(tmp_path)
    with pytest.raises(DamagedFile, match="is missing"):
        read_results(tmp_path / "nothing.json")


@pytest.mark.slow
def test_pretraining_is_a_second_column(tmp_path: Path) -> None:
    text = FILE.split("  markov:")[0] + "  duplicate:\n    run: {data: {rule: duplicate}}\npretrain: causal\n"
    suite = read_suite(written(tmp_path, text))
    result = run_suite(suite, SuiteOptions(seeds=1), out=tmp_path / "out")
    column = result.tasks[0].results["equal steps after pretraining"]
    pretraining = column.measurements_of("linear, pretraining")[0]
    # 12 steps of 16 rows: all 15 inputs after the first are predicted, where the rule has 7 targets
    assert (pretraining.tokens, column.measurements_of("linear")[0].tokens) == (12 * 16 * 15, 12 * 16 * 7)
    assert column.values("linear", "accuracy") != result.tasks[0].results[EQUAL_STEPS].values("linear", "accuracy")
    assert not list((tmp_path / "out/trainings").glob("*"))
    assert [table.title for table in result.tables][1] == "Accuracy at equal steps after pretraining"
    assert result.missing == 0


@pytest.mark.slow
def test_hours_end_a_sitting(tmp_path: Path) -> None:
    suite = read_suite(written(tmp_path))
    result = run_suite(suite, SuiteOptions(seeds=1, max_hours=1e-6), out=tmp_path / "out")
    assert result.missing == 8
    assert result.tables[0].rows[0][1] == "–"
    assert "8 trainings are not measured yet; the same command continues" in result.notes


def test_sizes_are_equal(tmp_path: Path) -> None:
    chosen = ["rfa", "gmlp", "universal-transformer-lm", "transformer-xl", "alibi"]
    cases = read_suite(written(tmp_path), chosen=chosen).tasks[0].comparison.cases
    assert [case.name for case in cases] == ["transformer-lm", *chosen]
    target = body_parameters(cases[0].run)
    for case in cases:
        assert abs(body_parameters(case.run) - target) <= TOLERANCE * target
    # attention 4 x 16 x 16, feed-forward 2 x 16 x 64, and biases, norms and positions besides
    assert 3072 <= target <= 3072 + 1000


def test_a_case_that_cannot_be_as_large_is_refused(tmp_path: Path) -> None:
    text = FILE.replace(
        "linear: {recipe: linear-transformer}", "linear: {recipe: linear-transformer, model: {depth: 9}}"
    )
    with pytest.raises(UserError, match=r"case linear: it has [\d,]+ parameters .* no value of ff_dim"):
        read_suite(written(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reference: transformer-lm", "reference: bert", "reference: 'bert' must be one of the cases"),
        ("title: Tiny", "titel: Tiny", "titel: no such setting; did you mean title?"),
        ("limits: {steps: 12}", "limits: {minutes: 1}", "a suite needs limits.steps as its only limit"),
        ("rule: duplicate", "rule: duplicat", "data.rule"),
        ("sweep:", "swep:", "swep: no such setting; did you mean sweep? (task duplicate)"),
        ("seeds: 2", "seeds: 2\nbudgets: operations", "must include steps"),
        ("transformer-lm >= 0", "transformer >= 0", "there is no case 'transformer'"),
        ("floors: {guessing: 16.7}", "floors: 3", "floors: must be a mapping"),
        ("  markov:", "  markov: 3\n  other:", "tasks.markov: must be a mapping"),
    ],
)
def test_mistakes_in_the_file_are_refused_in_a_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in FILE
    with pytest.raises(UserError) as caught:
        read_suite(written(tmp_path, FILE.replace(old, new)))
    lines = caught.value.lines if isinstance(caught.value, UserErrors) else [str(caught.value)]
    assert any(message in line for line in lines), lines


def test_all_means_every_causal_language_model(tmp_path: Path) -> None:
    names = fitting_recipes(read_suite(written(tmp_path)))
    assert {"transformer-lm", "rfa", "gmlp", "longformer-lm"} <= set(names)
    assert not {"bert", "vit", "transformer", "reformer"} & set(names)


AWKWARD = {
    "adaptive-span": "no value of",
    "early-exit-lm": "no value of",
    "bigbird-lm": r"max_length \(32\) must be a multiple of block",
}
"""Recipes that need sizes of their own in the full suite, and what it says without them."""


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=() if name in ("nsa", "deepseek", "qwen3-next") else pytest.mark.slow)
        for name, entry in sorted(RECIPES.items())
        if entry.card.task is LANGUAGE_MODELLING and "causal" in entry.card.promises
    ],
)
def test_the_full_suite_takes_every_causal_language_model(recipe: str) -> None:
    if recipe in AWKWARD:
        with pytest.raises(UserError, match=AWKWARD[recipe]):
            read_suite("suite/full", chosen=[recipe])
        return
    suite = read_suite("suite/full", chosen=[recipe])
    assert all(recipe in [case.name for case in task.comparison.cases] for task in suite.tasks)


def test_budgets_change_the_steps_by_the_cost_of_a_step(tmp_path: Path) -> None:
    comparison = read_suite(written(tmp_path)).tasks[0].comparison
    timings = {
        (comparison.name, "transformer-lm"): TrainingTiming("a", "m", 1.0, 0.1, 300),
        (comparison.name, "linear"): TrainingTiming("b", "m", 1.0, 0.2, 100),
    }
    for budget, steps in (("operations", 36), ("seconds", 6)):
        changed = with_budget(comparison, budget, "transformer-lm", timings, {"linear": 1})  # type: ignore[arg-type]
        linear = changed.case("linear")
        assert [case.run.limits.steps for case in changed.cases] == [12, steps]
        assert (linear.run.optim.lr, linear.trials[0].label) == (0.01, "optim.lr 0.01")
        assert [point.limits.steps for point in linear.points if point is not None] == [steps]


@pytest.mark.slow
def test_other_budgets_train_the_best_trials(tmp_path: Path) -> None:
    suite = read_suite(written(tmp_path, FILE.split("  duplicate:")[0] + "budgets: [steps, operations]\n"))
    result = run_suite(suite, SuiteOptions(seeds=1), out=tmp_path / "out")
    equal, operations = (result.tasks[0].results[name] for name in (EQUAL_STEPS, "equal operations"))
    assert operations.measurements_of("transformer-lm") == equal.measurements_of("transformer-lm")
    trial = operations.measurements_of("linear")[0]
    assert trial.trial == "optim.lr 0.01"
    assert trial.steps != 12
    assert [table.title for table in result.tables][:3] == [
        "Accuracy at equal steps",
        "Accuracy at equal operations",
        "State for decoding in kB, one sequence by its length",
    ]


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize("t", [0.0, 0.3, 2.5, 9.0])
def test_the_tails_of_student_t(t: float, degrees: int) -> None:
    assert student_t_tails(t, degrees) == pytest.approx(2 * stats.t.sf(t, degrees), abs=1e-9)


def test_paired_t_tests() -> None:
    first, second = [91.0, 88.0, 95.5], [90.0, 85.0, 93.0]
    assert paired_t_test(first, second) == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert paired_t_test([1.0], [2.0]) is None
    assert paired_t_test([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert holm_adjusted({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


def test_a_t_test_of_what_does_not_vary_has_no_value() -> None:
    # scipy warns and gives 0 or NaN
    assert paired_t_test([3.0, 2.0, 1.0], [2.0, 1.0, 0.0]) is None
    # equal but for the rounding of decimals
    assert paired_t_test([0.3, 0.7, 0.9], [0.1, 0.5, 0.7]) is None
    assert paired_t_test([0.1 + 0.2, 1.0], [0.3, 1.0]) == 1.0
    assert paired_t_test([1.0, math.nan], [2.0, 3.0]) is None
    assert paired_t_test([1.0, math.inf], [2.0, 3.0]) is None
    assert paired_t_test([], []) is None
    assert holm_adjusted({}) == {}
    with pytest.raises(ValueError, match=r"degrees \(0\) must be at least 1"):
        student_t_tails(1.0, 0)


def test_plans_are_in_words() -> None:
    plan = TrainingPlan((PlannedCase("t", "a", 10, 3600.0), PlannedCase("t", "b", 0, 9999.0)), 2)
    # five hours of each process, and half of the last training, during which one of them may be idle
    assert plan.summary_line == "this takes 5 hours 30 minutes on 2 jobs: 10 trainings"
    assert [spell_duration(seconds) for seconds in (8, 119, 120, 3600, 7260)] == [
        "8 seconds",
        "119 seconds",
        "2 minutes",
        "1 hour",
        "2 hours 1 minute",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "should be an object"),
        ("nothing", "is not a line of an archive"),
        ('{"key": 3}', "is damaged"),
    ],
)
def test_hostile_archives_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "measurements.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(DamagedFile, match=r"measurements.jsonl:1 is damaged") as caught:
        open_archive(path)
    assert message in str(caught.value)
