"""Comparisons in which something is wrong: found before the first training, or a row while the others go on."""

import json
from pathlib import Path
from typing import Any

import pytest

from manyformer.analysis.comparisons import compare
from manyformer.analysis.comparisons.training_task import TrainingTask
from manyformer.base.errors import UserError
from manyformer.cli import run
from manyformer.config import RUN_FILE

FILE = """title: Depths
seeds: 1
score: [loss]
cost: [parameters, step]
run:
  recipe: transformer-lm
  model: {dim: 8, depth: 1, heads: 2}
  data: {path: text.txt, length: 16}
  batch: {tokens: 64}
  limits: {steps: 2}
  evaluate: {every: null}
cases:
  one: {}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text.txt").write_text("the cat sat on the mat; " * 60)
    (tmp_path / "short.txt").write_text("the cat")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_cases(folder: Path, *cases: str) -> None:
    (folder / "mine.yaml").write_text("\n".join([FILE.rstrip(), *(f"  {case}" for case in cases), ""]))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("two: {data: {path: nowhere.txt}}", "case two: nowhere.txt: there is no such file"),
        ("two: {data: {path: short.txt}}", "case two: the training text has"),
        ("two: {model: {max_length: 8}}", "case two: a row (data.length) has 16 tokens, but the model allows 8"),
        ("two: {init_from: nowhere}", "case two: nowhere"),
    ],
)
def test_a_case_that_cannot_be_trained_is_named_before_the_first_training(
    here: Path, case: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cases(here, case)
    for words in (["--dry-run"], []):
        assert run(["compare", "mine.yaml", *words]) == 2
        assert message in capsys.readouterr().err
        assert not (here / "comparisons").exists()


def test_data_without_the_split_to_score_is_named_before_the_first_training(here: Path) -> None:
    (here / "mine.yaml").write_text("split: test\n" + FILE.replace("length: 16}", "length: 16, valid: text.txt}"))
    with pytest.raises(UserError, match="case one: split is test, but the data of transformer-lm has no test split"):
        compare("mine.yaml")


def test_a_case_that_fails_is_a_row_and_the_others_are_not_trained_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cases(here, "two: {model: {depth: 2}}", "three: {model: {depth: 3}}", "after two: {init_from: two}")
    measure = TrainingTask.measure
    trained: list[str] = []

    def fail_on_two(task: TrainingTask, *arguments: Any) -> Any:
        trained.append(task.case)
        measured = measure(task, *arguments)
        if task.case == "two" and task.run.model["depth"] == 2:
            raise UserError("its scores are no numbers")
        return measured

    monkeypatch.setattr(TrainingTask, "measure", fail_on_two)
    assert run(["compare", "mine.yaml"]) == 2
    printed = capsys.readouterr()
    rows = {line.split("  ")[0]: line.split() for line in printed.out.splitlines()}
    assert rows["two"][1] == "–"
    assert float(rows["three"][1]) > 0
    assert "note: two, seed 0 has failed: its scores are no numbers" in printed.out
    assert "error: a training has failed" in printed.err
    record = json.loads((here / "comparisons/mine/results.json").read_text())
    assert [failure["case"] for failure in record["failures"]] == ["two"]
    assert trained == ["one", "two", "three"]
    # after the mend the finished ones stay
    write_cases(here, "two: {model: {depth: 4}}", "three: {model: {depth: 3}}")
    trained.clear()
    assert run(["compare", "mine.yaml"]) == 0
    assert trained == ["two"]
    printed = capsys.readouterr()
    assert "the training that failed is now in comparisons/mine/two/seed-0.old-1" in printed.err
    assert (here / "comparisons/mine/two/seed-0" / RUN_FILE).is_file()


def test_errors_are_raised_where_nothing_is_measured(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(task: TrainingTask, *arguments: Any) -> Any:
        raise RuntimeError("a defect")

    write_cases(here)
    monkeypatch.setattr(TrainingTask, "measure", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        compare("mine.yaml")
    assert not (here / "comparisons/mine/results.json").exists()
