"""The benchmark as a whole: what it measures, what it concludes, what it says where it cannot measure."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from manyformer.analysis.benchmarks import BenchCandidate, BenchCell, BenchReport, MachineInfo, bench, write_report
from manyformer.analysis.benchmarks.bench import NEW_TOKENS, BenchSetting, CandidateBench
from manyformer.base.errors import UserError

SMALL = {"vocab": 29, "dim": 16, "depth": 1, "heads": 2}
MACHINE = MachineInfo("cpu", 1, "2.13", "float32", 1, 3, 0.0)


def synthetic(times: dict[str, list[float]], lengths: list[int], spread: float = 0.0) -> BenchReport:
    """A report as if these times had been measured; the first candidate is the reference."""
    against = next(iter(times))
    cells = []
    for label, seconds in times.items():
        for length, time, base in zip(lengths, seconds, times[against]):
            if math.isnan(time):
                cells.append(BenchCell(label, "step", length, reason="too slow"))
                continue
            ratio = time / base
            cells.append(
                BenchCell(
                    label, "step", length, time, time, time, ratio, ratio * (1 - spread), ratio * (1 + spread), 10**6
                )
            )
    return BenchReport(tuple(BenchCandidate(name, name) for name in times), against, MACHINE, tuple(cells))


@pytest.fixture(scope="module")
def report() -> BenchReport:
    swiglu = BenchCandidate("gated", "compose", {"feedforward": "swiglu"})
    return bench(["compose", swiglu, "bert", "transformer"], [8, 16], keywords=SMALL, rounds=2, device="cpu")


def test_everything_is_measured(report: BenchReport) -> None:
    labels = ["transformer-lm", "compose", "gated", "bert", "transformer"]
    assert report.labels == labels
    assert report.kinds == ["forward", "step", "decode"]
    assert report.lengths == [8, 16]
    assert len(report.cells) == 5 * 3 * 2
    for cell in report.cells:
        if (cell.label, cell.kind) == ("bert", "decode"):
            assert cell.seconds is cell.ratio is cell.memory is cell.flops is None
            assert cell.reason == "a later token changes all earlier outputs, so no state can be cached"
            continue
        assert cell.seconds is not None
        assert cell.lower_quartile is not None
        assert cell.upper_quartile is not None
        assert 0 < cell.lower_quartile <= cell.seconds <= cell.upper_quartile
        assert cell.ratio is not None
        assert cell.flops is not None
        assert cell.flops > 0
        if cell.label == "transformer-lm":
            assert cell.ratio == cell.ratio_low == cell.ratio_high == 1


def test_operations_and_states_are_those_of_the_recipes(report: BenchReport) -> None:
    """Forward at length n and one token after n, by hand; the step is three times the linear part, plus attention."""
    for length in (8, 16):
        linear, head, pair = 2 * 12 * 16 * 16, 2 * 16 * 29, 2 * 2 * 16
        forward = length * (linear + head) + pair * length * length
        assert report.cell("transformer-lm", "forward", length).flops == forward
        step = 3 * length * (linear + head) + pair * length * length * 7 // 2
        assert report.cell("transformer-lm", "step", length).flops == step
        # the tokens of a decoding job see length + 1, ..., length + NEW keys
        keys = length + (NEW_TOKENS + 1) / 2
        assert report.cell("transformer-lm", "decode", length).flops == int(linear + head + pair * keys)
        # keys and values in float32, a position and a segment for each token, a position and a segment for the row
        assert report.cell("transformer-lm", "decode", length).memory == length * (2 * 16 * 4 + 2 * 8) + 2 * 8


def test_the_report_is_printed_with_growth_and_notes(report: BenchReport) -> None:
    text = "\n".join(report.lines())
    assert text.startswith("cpu, 1 thread, float32, torch ")
    for title in ("forward pass, ms", "training step, ms", "decoding, ms per token", "operations: forward pass, train"):
        assert title in text
    assert "not counted: softmax" in text
    assert "note: bert (decode): a later token changes all earlier outputs" in text
    assert "growth over the longer half: transformer-lm n^" in text
    assert "faster than transformer-lm from length: compose" in text


def test_files_hold_everything(report: BenchReport, tmp_path: Path) -> None:
    for name in ("a.json", "deep/a.csv", "a.png"):
        write_report(report, tmp_path / name)
    read = json.loads((tmp_path / "a.json").read_text())
    assert [BenchCell(**cell) for cell in read["cells"]] == list(report.cells)
    assert read["candidates"][2] == {"label": "gated", "recipe": "compose", "keywords": {"feedforward": "swiglu"}}
    assert read["machine"]["threads"] == 1
    assert set(read["summary"]["gated"]["step"]) == {"growth", "faster_from"}
    rows = list(csv.DictReader(io.StringIO((tmp_path / "deep" / "a.csv").read_text())))
    assert [(row["label"], row["kind"], int(row["length"])) for row in rows] == [
        (cell.label, cell.kind, cell.length) for cell in report.cells
    ]
    assert float(rows[0]["seconds"]) == report.cells[0].seconds
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"must end in \.csv, \.json or one of \.png, \.svg, \.pdf"):
        write_report(report, tmp_path / "a.txt")


def test_growth_is_the_exponent_of_the_longer_half() -> None:
    lengths = [2**n for n in range(6, 12)]
    # an overhead hides the law at small lengths
    report = synthetic({"square": [max(1.0, (n / 256) ** 2) for n in lengths], "flat": [3.0] * 6}, lengths)
    assert report.growth("square", "step") == pytest.approx(2)
    assert report.growth("flat", "step") == pytest.approx(0)
    assert synthetic({"one": [1.0]}, [64]).growth("one", "step") is None


@pytest.mark.parametrize(
    ("times", "spread", "expected"),
    [
        ([2.0, 0.9, 0.8, 0.5], 0.0, 128),
        ([0.5, 2.0, 0.9, 0.8], 0.0, 256),
        ([0.9, 0.9, 0.9, 0.9], 0.0, 64),
        ([2.0, 2.0, 2.0, 1.0], 0.0, None),
        ([0.5, 0.5, 0.5, 1.5], 0.0, None),
        ([2.0, 0.98, 0.98, 0.5], 0.05, 512),
        ([2.0, 0.5, 0.5, math.nan], 0.0, 128),
    ],
)
def test_crossover_holds_from_there_on_and_not_by_chance(
    times: list[float], spread: float, expected: int | None
) -> None:
    report = synthetic({"softmax": [1.0] * 4, "other": times}, [64, 128, 256, 512], spread)
    assert report.crossover("other", "step") == expected


def test_a_step_changes_the_model_and_decoding_begins_anew_each_time() -> None:
    setting = BenchSetting(torch.device("cpu"), 2, 16, "auto", 0, SMALL)
    for recipe in ("transformer-lm", "transformer"):
        one: Any = CandidateBench(BenchCandidate("x", recipe), setting)
        before = [value.clone() for value in one.model.parameters()]
        one.job("step", 16)()
        changed = [not torch.equal(a, b) for a, b in zip(before, one.model.parameters())]
        assert all(changed)
        assert all(value.grad is None for value in one.model.parameters())
        job = one.job("decode", 16)
        first, again = job(), job()
        assert first.shape == (2, NEW_TOKENS)
        assert torch.equal(first, again)


def test_candidates_are_built_alike() -> None:
    setting = BenchSetting(torch.device("cpu"), 1, 40, "auto", 0, {"dim": 16, "heads": 2, "classes": 7})
    one = CandidateBench(BenchCandidate("x", "transformer-lm", {"depth": 3}), setting).model.spec.keywords
    assert (one["vocab"], one["dim"], one["depth"], one["heads"]) == (256, 16, 3, 2)
    assert one["max_length"] == 40 + NEW_TOKENS
    assert CandidateBench(BenchCandidate("y", "transformer-classifier"), setting).model.spec.keywords["classes"] == 7


def test_a_slow_candidate_is_spared_greater_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    report = bench(
        ["compose"],
        [8, 16],
        what=["forward"],
        keywords=SMALL,
        rounds=1,
        max_seconds=0.0,
        device="cpu",
        on_progress=heard.append,
    )
    assert heard == ["forward, length 8", "forward, length 16"]
    assert all(cell.seconds is None for cell in report.cells)
    reasons = {cell.reason for cell in report.cells}
    assert reasons == {"too slow from length 8 on: one run takes 0 s, the limit is 0 s"}
    assert "–" in "\n".join(report.lines())


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_running_out_of_memory_is_a_reason_in_the_report(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CandidateBench.job

    def job(self: CandidateBench, what: Any, length: int) -> Any:
        if self.card.name == "compose" and length == 16:
            raise error
        return real(self, what, length)

    monkeypatch.setattr(CandidateBench, "job", job)
    report = bench(["compose"], [8, 16, 24], what=["forward"], keywords=SMALL, rounds=1, device="cpu")
    assert report.cell("compose", "forward", 8).seconds is not None
    assert {report.cell("compose", "forward", n).reason for n in (16, 24)} == {"out of memory at length 16"}
    assert report.cell("transformer-lm", "forward", 24).seconds is not None


@pytest.mark.parametrize(
    ("recipes", "words", "message"),
    [
        ([], {}, "nothing to measure: give at least one recipe"),
        (["bert", "bert"], {}, "the label 'bert' is used twice"),
        (["brt"], {}, r"there is no recipe 'brt'; did you mean bert"),
        (["bert"], {"lengths": []}, "lengths must be 1 or more tokens"),
        (["bert"], {"lengths": [0]}, "lengths must be 1 or more tokens"),
        (["bert"], {"rounds": 0}, "rounds must be at least 1, got 0"),
        (["bert"], {"what": ["forwards"]}, r"what \('forwards'\) must be among forward, step, decode"),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(recipes: Any, words: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench(recipes, **({"lengths": [8], "device": "cpu", "keywords": SMALL} | words))


def test_layers_that_decode_by_forward_are_noted() -> None:
    candidate = BenchCandidate("experts", "mixtral", {})
    report = bench([candidate], lengths=[8], what=["decode"], rounds=1, against=None, keywords={"dim": 16, "depth": 1})
    assert any(note.startswith("experts: decodes by forward in body.0.ff.inner") for note in report.notes)


def test_a_candidate_gets_a_length_of_whole_blocks() -> None:
    report = bench(["bigbird"], [16], what=["forward"], against=None, rounds=1, keywords={"dim": 32, "depth": 1})
    assert report.cell("bigbird", "forward", 16).seconds is not None
    assert report.failed == []


def test_a_candidate_that_cannot_be_built_is_a_row_and_the_others_are_measured() -> None:
    odd = BenchCandidate("odd", "transformer-lm", {"heads": 3})
    report = bench(
        [odd, "transformer-lm"], [16], what=["forward"], against=None, rounds=1, keywords={"dim": 32, "depth": 1}
    )
    assert report.failed == ["odd"]
    assert "must be a multiple" in (report.cell("odd", "forward", 16).reason or "")
    assert report.cell("transformer-lm", "forward", 16).seconds is not None
    assert any("odd (forward): fails: " in line for line in report.lines())
