"""Comparisons carried out: trained, scored, told, kept through kills, and taken up again."""

import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manyformer.analysis.comparisons import CaseMeasurement, ComparisonResult, compare
from manyformer.analysis.comparisons import runner as job_pool
from manyformer.analysis.comparisons.claims import judge_claim, parse_claim
from manyformer.base.errors import UserError
from manyformer.config import RUN_FILE

FILE = """title: Positions
seeds: 2
score: [loss, accuracy]
run:
  recipe: compose
  model: {dim: 16, depth: 1, heads: 2}
  data: {kind: synthetic, length: 16, valid: 1024}
  batch: {tokens: 256}
  limits: {steps: 4}
  optim: {lr: 0.01}
  evaluate: {every: null}
cases:
  learned: {model: {position: learned}}
  rope: {model: {position: rope}}
  rope, YaRN: {trained: rope, model: {position: rope-yarn, length_scale: 2.0}}
sweep: {data.length: [16, 32]}
claims: [rope@16 <= learned@16 + 9, rope@32 < 0, learned@32 <= 9]
"""


@pytest.fixture(scope="module")
def finished_comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ComparisonResult, list[str]]:
    """A comparison carried out once: its folder, what it gave and what it said."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "mine.yaml").write_text(FILE)
    said: list[str] = []
    return folder, compare(folder / "mine.yaml", out=folder / "out", log=said.append), said


def test_every_case_is_trained_with_every_seed(finished_comparison: tuple[Path, ComparisonResult, list[str]]) -> None:
    folder, actual, said = finished_comparison
    runs = sorted(str(path.parent.relative_to(folder / "out")) for path in (folder / "out").glob(f"*/*/{RUN_FILE}"))
    assert runs == ["learned/seed-0", "learned/seed-1", "rope/seed-0", "rope/seed-1"]
    assert [(one.case, one.seed) for one in actual.measurements] == [
        (case, seed) for case in ("learned", "rope", "rope, YaRN") for seed in (0, 1)
    ]
    assert len(said) == 4
    assert said[0].startswith("learned, seed 0: loss ")
    assert said[-1].endswith("4 of 4 trained")


def test_what_cannot_be_scored_is_a_dash_with_its_reason(
    finished_comparison: tuple[Path, ComparisonResult, list[str]],
) -> None:
    _, actual, _ = finished_comparison
    assert actual.values("learned", "loss", 1) == []
    assert actual.rows[0][2] == "–"
    assert "learned at data.length 32: it was built for 16 positions, but there are 32" in actual.notes
    assert actual.mean("rope", "loss", 1) is not None


def test_scores_are_those_of_the_trained_model(finished_comparison: tuple[Path, ComparisonResult, list[str]]) -> None:
    folder, actual, _ = finished_comparison
    result = json.loads((folder / "out/rope/seed-1/result.json").read_text())
    assert actual.measurements_of("rope")[1].scores[0]["loss"] == pytest.approx(result["scores"]["loss"], abs=1e-6)
    assert actual.measurements_of("rope")[1].scores[0]["accuracy"] == pytest.approx(
        100 * result["scores"]["accuracy"], abs=1e-6
    )
    # other angles, same weights: near, and not the same
    plain, scaled = (actual.values(case, "loss") for case in ("rope", "rope, YaRN"))
    assert all(a != b and abs(a - b) < 0.5 for a, b in zip(plain, scaled, strict=True))


def test_the_table_has_mean_and_deviation(finished_comparison: tuple[Path, ComparisonResult, list[str]]) -> None:
    folder, actual, _ = finished_comparison
    values = actual.values("rope", "loss")
    row = actual.rows[1]
    assert actual.headers[:3] == ["case", "loss (nats) at 16", "loss (nats) at 32"]
    assert row[1] == f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"
    assert int(row[5].replace(",", "")) > 1000
    table = (folder / "out/table.md").read_text()
    assert f"| rope | {row[1]} |" in table
    assert "claim holds: rope@16 <= learned@16 + 9" in table
    assert "claim DOES NOT HOLD: rope@32 < 0" in table
    # what does not hold is the first line below the title
    assert table.splitlines()[2].startswith("**DOES NOT HOLD: rope@32 < 0 (")
    assert table.count("**DOES NOT HOLD") == 1
    assert "claim cannot be checked: learned@32 <= 9 (a value is missing)" in table


def test_scripts_find_everything(finished_comparison: tuple[Path, ComparisonResult, list[str]]) -> None:
    folder, actual, _ = finished_comparison
    record = json.loads((folder / "out/results.json").read_text())
    assert record["values"] == [16, 32]
    assert record["table"][1]["scores"][0]["mean"] == pytest.approx(actual.mean("rope", "loss"))
    assert [claim["holds"] for claim in record["claims"]] == [True, False, None]
    lines = (folder / "out/table.csv").read_text().splitlines()
    assert lines[0] == "case,seed,data.length,score,value"
    assert len(lines) == 1 + 3 * 2 * 2 * 2
    assert "learned,0,32,loss," in lines
    assert (folder / "out/picture.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_done_is_not_done_again(
    finished_comparison: tuple[Path, ComparisonResult, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found, _ = finished_comparison
    monkeypatch.setattr(
        "manyformer.analysis.comparisons.training_task.train", lambda *a, **k: pytest.fail("trained again")
    )
    again = compare(folder / "mine.yaml", out=folder / "out")
    assert again.measurements == found.measurements
    fewer = compare(folder / "mine.yaml", out=folder / "out", seeds=1)
    assert fewer.rows[1][1] == f"{found.values('rope', 'loss')[0]:.3f}"
    monkeypatch.undo()
    # other questions to the same models
    (folder / "more.yaml").write_text(FILE.replace("[16, 32]", "[16, 32, 48]"))
    more = compare(folder / "more.yaml", out=folder / "out")
    assert more.values("rope", "loss", 1) == found.values("rope", "loss", 1)
    assert len(more.values("rope", "loss", 2)) == 2


def test_another_budget_is_another_comparison(finished_comparison: tuple[Path, ComparisonResult, list[str]]) -> None:
    folder, _, _ = finished_comparison
    with pytest.raises(UserError, match=r"learned/seed-0 was trained with other settings .* choose another --out"):
        compare(folder / "mine.yaml", ["limits.steps=5"], out=folder / "out")


@pytest.mark.slow
def test_steps_are_timed_and_one_setting_needs_no_sweep(tmp_path: Path) -> None:
    text = FILE.replace("sweep: {data.length: [16, 32]}", "cost: [step, memory]").replace("@16", "").split("claims")[0]
    claims = "claims: [rope <= learned + 9, accuracy of rope >= 0, step of rope <= learned * 99, step of rope < 0]\n"
    (tmp_path / "mine.yaml").write_text(text + claims)
    actual = compare(tmp_path / "mine.yaml", out=tmp_path / "out", seeds=1)
    assert actual.headers == ["case", "loss (nats)", "accuracy (%)", "ms a step", "MB a step"]
    assert float(actual.rows[0][3]) > 0
    assert actual.rows[2][3] == "–"
    assert [verdict.holds for verdict in actual.verdicts] == [True, True, True, False]
    assert (tmp_path / "out/picture.png").stat().st_size > 10_000
    fresh = compare(tmp_path / "mine.yaml", out=tmp_path / "out", seeds=1, fresh=True)
    assert (tmp_path / "out.old-1").is_dir()
    assert fresh.mean("rope", "loss") == actual.mean("rope", "loss")


def test_models_that_became_larger_than_the_reference_are_noted(tmp_path: Path) -> None:
    """Data may decide a size that was assumed when sizes were made equal, such as the longest of all sentences."""
    text = FILE.replace("score:", "reference: learned\nscore:").split("  rope, YaRN")[0]
    (tmp_path / "mine.yaml").write_text(text)
    actual = compare(tmp_path / "mine.yaml", out=tmp_path / "out", seeds=1)
    assert not any("parameters" in note for note in actual.notes)
    first, second = actual.measurements
    assert first.parameters is not None
    larger = replace(actual, measurements=(first, replace(second, parameters=2 * first.parameters)))
    note = f"rope has {2 * first.parameters:,} parameters with its vocabulary, learned has {first.parameters:,}"
    assert note in larger.notes


def test_a_case_may_begin_with_the_weights_of_another(tmp_path: Path) -> None:
    text = FILE.split("cases:")[0] + (
        "cases:\n"
        "  second: {init_from: first, model: {position: rope}, optim: {lr: 1.0e-20}, limits: {steps: 1}}\n"
        "  first: {model: {position: rope}}\n"
        "cost: [minutes, total]\n"
    )
    (tmp_path / "mine.yaml").write_text(text)
    actual = compare(tmp_path / "mine.yaml", out=tmp_path / "out")
    assert actual.values("second", "loss") == pytest.approx(actual.values("first", "loss"), abs=1e-6)
    minutes = {case: statistics.fmean(m.minutes or 0.0 for m in actual.measurements_of(case)) for case in actual.cases}
    assert [row[-1] for row in actual.rows] == [f"{sum(minutes.values()):.1f}", f"{minutes['first']:.1f}"]
    assert actual.values("first", "loss")[0] != pytest.approx(actual.values("first", "loss")[1], abs=1e-4)
    (tmp_path / "out").rename(tmp_path / "moved")
    again = compare(tmp_path / "mine.yaml", out=tmp_path / "moved")
    assert again.measurements == actual.measurements


TRIALS = FILE.replace("claims: [rope@16 <= learned@16 + 9, rope@32 < 0, learned@32 <= 9]\n", "").replace(
    "  optim: {lr: 0.01}\n", ""
)


def test_the_best_trial_is_trained_with_the_other_seeds(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(TRIALS + "trials: {optim.lr: [1.0e-20, 0.01], optim.weight_decay: [0.0]}\n")
    said: list[str] = []
    actual = compare(tmp_path / "mine.yaml", out=tmp_path / "out", log=said.append)
    # the others are the trials of the first seed
    assert len(said) == 6
    best = "optim.lr 0.01, optim.weight_decay 0.0"
    assert {one.trial for one in actual.measurements} == {best}
    assert [(one.case, one.seed) for one in actual.measurements] == [
        (case, seed) for case in ("learned", "rope", "rope, YaRN") for seed in (0, 1)
    ]
    trials = {one.trial: one for one in actual.trials if one.case == "learned"}
    assert len(trials) == 2
    assert trials[best] == actual.measurements_of("learned")[0]
    assert trials[best].selection == pytest.approx(actual.values("learned", "loss")[0], abs=1e-6)
    assert any(note.startswith("trials of rope: optim.lr 1e-20") and note.endswith("(best)") for note in actual.notes)
    again = compare(tmp_path / "mine.yaml", out=tmp_path / "out", jobs=2)
    assert again.measurements == actual.measurements


@pytest.mark.slow
def test_all_trials_are_cases_and_two_processes_give_the_same(tmp_path: Path) -> None:
    text = TRIALS.replace("seeds: 2", "seeds: 1") + "trials: {optim.lr: [0.001, 0.01]}\nselect: all\n"
    (tmp_path / "mine.yaml").write_text(text)
    actual = compare(tmp_path / "mine.yaml", out=tmp_path / "out", jobs=2)
    names = ["learned", "rope", "rope, YaRN"]
    assert actual.cases == [f"{name}, optim.lr {lr}" for name in names for lr in ("0.001", "0.01")]
    assert all(actual.mean(case, "loss") is not None for case in actual.cases)
    (tmp_path / "mine.yaml").write_text(
        TRIALS.replace("seeds: 2", "seeds: 1").replace("limits:", "optim: {lr: 0.01}\n  limits:")
    )
    alone = compare(tmp_path / "mine.yaml", out=tmp_path / "alone")
    for name in names:
        assert actual.values(f"{name}, optim.lr 0.01", "loss") == pytest.approx(alone.values(name, "loss"), abs=1e-5)


def test_a_training_that_diverges_is_a_dash(tmp_path: Path) -> None:
    text = FILE.replace(
        "rope: {model: {position: rope}}", "rope: {model: {position: rope}, optim: {lr: 1.0e+30, max_grad_norm: null}}"
    )
    (tmp_path / "mine.yaml").write_text(text.split("  rope, YaRN")[0] + "sweep: {data.length: [16]}\n")
    actual = compare(tmp_path / "mine.yaml", out=tmp_path / "out", seeds=1)
    assert actual.mean("learned", "loss") is not None
    assert actual.rows[1][1] == "–"
    assert any("rope at data.length 16: seed 0: " in note for note in actual.notes)


def ended_by(number: signal.Signals, folder: Path, step: int) -> int:
    """The exit code of the command, which gets a signal once it has saved the second case at `step`."""
    command = [sys.executable, "-m", "manyformer", "compare", "mine.yaml", "limits.steps=60", "--seeds", "1"]
    command += ["save.every=10", "--out", "out"]
    # as many threads as in this process: sums in another order differ in their last digits
    alike = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=alike)
    checkpoints = folder / "out/rope/seed-0/checkpoints"
    begun = time.monotonic()
    while not any(int(saved.name.split("-")[1]) >= step for saved in checkpoints.glob("step-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - begun < 200
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.communicate(timeout=100)
    return process.returncode


@pytest.mark.slow
def test_a_comparison_interrupted_and_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(FILE)
    assert ended_by(signal.SIGINT, tmp_path, 10) == 130
    kept = (tmp_path / "out/learned/seed-0/measured.json").stat().st_mtime_ns
    assert not (tmp_path / "out/rope/seed-0/measured.json").exists()
    assert ended_by(signal.SIGKILL, tmp_path, 30) == -9
    assert not (tmp_path / "out/rope/seed-0/measured.json").exists()
    begun: list[int] = []

    def hear(text: str) -> None:
        if text.startswith("rope, seed 0: step "):
            begun.append(int(text.split()[4].rstrip(",")))

    settings = ["limits.steps=60", "save.every=10"]
    actual = compare(tmp_path / "mine.yaml", settings, seeds=1, out=tmp_path / "out", on_progress=hear)
    assert begun[0] > 30, "it began from an earlier step"
    assert (tmp_path / "out/learned/seed-0/measured.json").stat().st_mtime_ns == kept
    full = compare(tmp_path / "mine.yaml", settings, seeds=1, out=tmp_path / "whole")
    assert [one.scores for one in full.measurements] == [one.scores for one in actual.measurements]


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("a@1 <= b@1", True),
        ("a@1 >= b@1", False),
        ("a + c@1 <= b@1 + 0.5", True),
        ("b@1 < a@1 * 1.5", False),
        ("b@1 <= a@1 * 2", True),
        ("b@1 > a@1 + 0.99", True),
        ("a@1 <= b@1 - 0.99", True),
        ("b@2 < 3", None),
    ],
)
def test_claims(text: str, holds: bool | None) -> None:
    values = {("a", 0): 1.0, ("b", 0): 2.0, ("a + c", 0): 2.4}
    verdict = judge_claim(
        parse_claim(text, ["a", "b", "a + c"], [1, 2]), lambda place: values.get((place.case, place.value_index))
    )
    assert verdict.holds is holds


def test_numbers_of_one_seed_have_no_deviation() -> None:
    one = CaseMeasurement("a", 0, ({"loss": 1.0},), (None,), 1.0, 3, 48, 5)
    actual = ComparisonResult(None, 1, (one,))  # type: ignore[arg-type]
    assert actual.mean("a", "loss") == 1.0
    assert actual.deviation("a", "loss") is None


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from manyformer.cli import run

    def call(*words: str) -> tuple[int, Any]:
        capsys.readouterr()
        code = run(["compare", *words])
        return code, capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(FILE)
    assert "positions/extrapolation" in call()[1].out
    assert {record["name"] for record in json.loads(call("--json")[1].out)} >= {"positions/extrapolation"}
    code, said = call("mine.yaml", "--dry-run")
    assert (code, said.err) == (0, "")
    assert "4 trainings" in said.out
    assert "weights of rope" in said.out
    assert not (tmp_path / "comparisons").exists()
    assert call("mine.yaml", "--show")[1].out == FILE
    code, said = call("mine.yaml", "--seeds", "1", "limits.steps=2")
    assert code == 0
    assert "note: learned at data.length 32" in said.out
    assert "wrote comparisons/mine/picture.png" in said.out
    assert "2 of 2 trained" in said.err
    code, said = call("mine.yaml", "--seeds", "1", "limits.steps=2", "--json")
    assert json.loads(said.out)["seeds"] == 1
    for words, message in (
        (["mine.yml"], "there is no comparison and no file 'mine.yml'"),
        (["mine.yaml", "--sedes", "3"], "(or the option --seeds?)"),
        (["limits.steps=3"], "needs a name or a file"),
        (["mine.yaml", "limits.steps=3"], "or start over with --fresh"),
    ):
        code, said = call(*words)
        assert code == 2
        assert message in said.err, said.err
        assert all(line.startswith("error: ") for line in said.err.splitlines())
    assert "sweep:" in call("--help")[1].out


def test_what_models_count_of_their_own_work_is_a_score(tmp_path: Path) -> None:
    file = FILE.split("run:")[0].replace("[loss, accuracy]", "[steps, span]").replace("seeds: 2", "seeds: 1")
    (tmp_path / "mine.yaml").write_text(
        file
        + """run:
  recipe: universal-transformer-lm
  model: {dim: 16, depth: 3, heads: 2}
  data: {kind: synthetic, rule: hops, symbols: 4, length: 8, valid: 256}
  batch: {tokens: 64}
  limits: {steps: 2}
  evaluate: {every: null}
cases:
  universal: {}
  spans: {recipe: adaptive-span, model: {depth: 1, max_span: 12, span_init: 0.5}}
sweep: {data.num_hops: [1, 3]}
"""
    )
    actual = compare(tmp_path / "mine.yaml", out=tmp_path / "out")
    for index in range(2):
        steps, span = actual.mean("universal", "steps", index), actual.mean("spans", "span", index)
        assert steps is not None
        assert 1 <= steps <= 3
        assert span == pytest.approx(6, abs=0.5)
        assert actual.mean("universal", "span", index) is actual.mean("spans", "steps", index) is None


def test_a_process_that_does_not_end_by_itself_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for a lock of another one hears no SIGTERM: an error must end the command all the same."""
    monkeypatch.setattr(job_pool, "STOP_SECONDS", 0.5)
    begun = tmp_path / "begun"
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"

    def fail() -> None:
        with job_pool.worker_pool(2) as pool:
            assert pool is not None
            pool.submit(exec, f"{ignore}; open({str(begun)!r}, 'w'); time.sleep(600)")
            while not begun.exists():
                time.sleep(0.05)
            raise ValueError("an error")

    with pytest.raises(ValueError, match="an error"):
        fail()
    assert not multiprocessing.active_children()


def test_a_score_that_is_no_number_never_wins(finished_comparison: tuple[Path, ComparisonResult, list[str]]) -> None:
    """A case that diverged with one of two seeds has no mean, not the better one of the other seed."""
    _, result, _ = finished_comparison

    def diverged(measurement: CaseMeasurement) -> CaseMeasurement:
        if (measurement.case, measurement.seed) != ("rope", 1):
            return measurement
        return replace(measurement, scores=tuple({**scores, "loss": math.nan} for scores in measurement.scores))

    changed = replace(result, measurements=tuple(map(diverged, result.measurements)))
    assert changed.mean("rope", "loss") is changed.deviation("rope", "loss") is None
    assert changed.mean("learned", "loss") == result.mean("learned", "loss")
    assert "rope at data.length 16: loss is nan with seed 1, so it has no mean" in changed.notes
    row = next(row for row in changed.rows if row[0] == "rope")
    assert row[1] == "–"
    assert changed.verdicts[0].holds is None
    content = json.loads(changed.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    measured = next(one for one in content["measured"] if (one["case"], one["seed"]) == ("rope", 1))
    assert measured["scores"][0]["loss"] is None
