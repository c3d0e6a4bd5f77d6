"""The record of what a change must leave as it is: it is repeatable, and a difference is named with its size."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import same_results
from sameness import paired_times, recipe_numbers
from sameness.commands import without_changes
from sameness.comparison import differences

SOURCES = Path(__file__).parents[1] / "src"


def write(file: Path, *, again: bool = False, source: Path = SOURCES) -> None:
    options = Namespace(file=file, only=["recipes"], recipes=["fnet", "lstm-lm"], again=again)
    same_results.write_here(options, source)


def compared(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = same_results.main(["compare", str(old), str(new)])
    return code, capsys.readouterr().out


def test_a_second_record_of_the_same_sources_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    write(old)
    write(new)
    assert compared(old, new, capsys) == (0, "recipes: 0 of 2 entries differ\n")
    record = json.loads(old.read_text())["recipes"]
    assert len(record["lstm-lm"]["losses"]["loss"]) == 20
    assert [len(tokens) for tokens, _ in record["lstm-lm"]["generated"]["greedy"]] == [18, 18]
    assert record["fnet"]["cached logits"] == "NothingToWrite: it has no decoding state"


def test_another_learning_rate_is_named_with_its_recipe_and_the_step_from_which_losses_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    write(old)
    monkeypatch.setattr(recipe_numbers, "LEARNING_RATE", 1.001e-3)
    write(new)
    code, printed = compared(old, new, capsys)
    assert code == 1
    assert "recipes: 2 of 2 entries differ" in printed
    # the first two losses are of two batches; the weights of the second step are others already
    assert "lstm-lm / losses / loss: " in printed
    assert "first at number 2 of 20" in printed
    assert "logits" not in printed


def test_what_is_there_is_kept_and_other_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "record.json"
    write(file)
    record = json.loads(file.read_text())
    record["recipes"]["fnet"] = "kept"
    file.write_text(json.dumps(record))
    write(file)
    assert json.loads(file.read_text())["recipes"]["fnet"] == "kept"
    write(file, again=True)
    assert json.loads(file.read_text())["recipes"]["fnet"] != "kept"
    monkeypatch.setattr(same_results, "digest_of_sources", lambda source: "another")
    with pytest.raises(SystemExit, match=r"record\.json is of other sources"):
        write(file)


def test_sources_that_are_not_imported_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"was imported, not "):
        write(tmp_path / "record.json", source=tmp_path)


def tensor(digest: str, *numbers: float) -> dict[str, Any]:
    return {"digest": digest, "shape": [len(numbers)], "scale": 2.0, "numbers": list(numbers)}


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {}, ["a: gone; it was 1"]),
        ({}, {"a": 1}, ["a: new: 1"]),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": tensor("x", 1.0, 2.0)}, {"a": tensor("x", 1.0, 2.0)}, []),
        (
            {"a": tensor("x", 1.0, 2.0)},
            {"a": tensor("y", 1.0, 2.5)},
            ["a: 5.00e-01 apart (2.5e-01 of their size), first at number 2 of 2"],
        ),
        ({"a": tensor("x", 1.0)}, {"a": tensor("y", 1.0)}, ["a: equal where numbers are kept"]),
        ({"a": "loss 1.5 of 2"}, {"a": "loss 1.6 of 2"}, ["a: the same words, 1 of 2 numbers changed: 1.5 -> 1.6"]),
        ({"a": "one\ntwo"}, {"a": "one\nthree"}, ["a: \n      -two\n      +three"]),
        ({"seconds": 1.0}, {"seconds": 2.0}, []),
    ],
)
def test_differences_are_told_with_their_size(old: Any, new: Any, lines: list[str]) -> None:
    found = [f"{' / '.join(difference.place)}: {difference.sentence}" for difference in differences(old, new)]
    assert found == lines


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("12 tokens in 0.31 s (38 tokens/s) after 4", "12 tokens in TIME (RATE tokens/s) after 4"),
        ("3 steps, 1.5 GB, 0.25 ms", "3 steps, 1.5 GB, TIME"),
        ('{"loss": 1.25, "seconds": 0.5}', '{"loss": 1.25, "seconds": MEASURED}'),
        ('{"data_seconds": 0.5, "step": 4}', '{"data_seconds": MEASURED, "step": 4}'),
        ("FOLDER/runs/a at 2026-01-02 10:11:12", "FOLDER/runs/a at DATE"),
    ],
)
def test_times_are_left_out(text: str, plain: str, tmp_path: Path) -> None:
    assert without_changes(text.replace("FOLDER", str(tmp_path)), tmp_path) == plain


class CountedWorker:
    """A worker whose steps take as many seconds as a list says."""

    def __init__(self, seconds: list[float], peak: int | None) -> None:
        self._seconds, self._peak = iter(seconds), peak
        self.ended = False

    def begin(self, job: str) -> dict[str, Any]:
        return {"recipe": job}

    def seconds(self) -> float:
        return next(self._seconds)

    def memory(self) -> int | None:
        return self._peak

    def end(self) -> None:
        self.ended = True


def counted_workers(monkeypatch: pytest.MonkeyPatch, peak: int | None) -> list[CountedWorker]:
    """Those that `compare_jobs` starts from now on: the new sources, named last, take a tenth more time."""
    started: list[CountedWorker] = []

    def start(source: Path) -> CountedWorker:
        started.append(CountedWorker([1.0 if source.name == "old" else 1.1] * 20, peak))
        return started[-1]

    monkeypatch.setattr(paired_times, "Worker", start)
    return started


@pytest.mark.parametrize("peak", [None, 3 << 20])
def test_a_job_has_a_row_with_the_ratio_of_times_and_of_memory(
    peak: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = counted_workers(monkeypatch, peak)
    (row,) = paired_times.compare_jobs(Path("old"), Path("new"), ["step of dense"], 4, 60.0)
    assert isinstance(row, paired_times.PairedTime)
    assert (row.ratio, row.low, row.high) == pytest.approx((1.1, 1.1, 1.1))
    assert (row.job, row.rounds) == ("step of dense", 4)
    assert row.memory == (None if peak is None else (peak, peak))
    assert ("1.000   3.0 -> 3.0 MiB" in str(row)) is (peak is not None)
    assert len(started) == 4
    assert all(worker.ended for worker in started)


def test_a_job_that_there_is_no_time_for_is_named_and_one_that_has_begun_has_two_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted_workers(monkeypatch, None)
    clock = iter([0.0, 1.0, 1.0, 90.0, 90.0, 90.0, 90.0])
    monkeypatch.setattr(paired_times.time, "monotonic", lambda: next(clock))
    first, second = paired_times.compare_jobs(Path("old"), Path("new"), ["step of dense", "step of window"], 12, 60.0)
    assert isinstance(first, paired_times.PairedTime)
    assert first.rounds == paired_times.MIN_ROUNDS
    assert isinstance(second, str)
    assert second.split() == [
        "step",
        "of",
        "window",
        "not",
        "timed:",
        "the",
        "60",
        "seconds",
        "are",
        "over",
        "(--seconds)",
    ]


def test_jobs_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no job has a name with one of \['stride'\]; there are step of dense"):
        same_results.main(["time", str(tmp_path), str(SOURCES), "--jobs", "stride"])


def test_folders_without_the_package_are_not_timed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no package manyformer: name the folder src of a checkout"):
        same_results.main(["time", str(tmp_path), str(SOURCES), "--jobs", "dense"])
