"""From a trained run to a calibrated model and a table of thresholds, by the command line as people use it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.cli import run as command
from manyformer.config import RunConfig
from manyformer.inference.early_exit import DecodingWorkload, ThresholdCalibration, calibrate, exit_layers, load_prompts
from manyformer.inference.early_exit.calibration import document_means
from manyformer.inference.early_exit.early_decoding import exit_threshold
from manyformer.inference.early_exit.sweep import ThresholdPoint, best_in_bins, random_thresholds
from manyformer.inference.generate import generate
from manyformer.nn.depth.early_exit_stack import EarlyExit

TINY: dict[str, Any] = {"dim": 16, "depth": 3, "heads": 2, "ff_dim": 24, "dropout": 0.0}


def trained(out: Path, recipe: str, model: dict[str, Any], **given: Any) -> Path:
    file = out.parent / "pairs.tsv"
    file.write_text("source\ttarget\n" + "".join(f"{n} {n + 1}\t{n + 1} {n}\n" for n in range(300)))
    fresh = out.parent / "fresh.tsv"
    fresh.write_text("source\ttarget\n" + "".join(f"{n} {n + 1}\t{n + 1} {n}\n" for n in range(500, 560)))
    data = {"kind": "pairs", "path": str(file), "tokenizer": "char", "valid": 0.3, "test": str(fresh)}
    values = {
        "recipe": recipe, "model": TINY | model, "data": data, "limits": {"steps": 3}, "batch": {"tokens": 512},
        "evaluate": {"every": None}, "device": "cpu", "out": str(out), **given,
    }  # fmt: skip
    mf.train(RunConfig.model_validate(values), on_event=lambda event: None)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # as many prompts as are needed are held out, and the model has hardly learned anything
    return trained(tmp_path_factory.mktemp("exits") / "calm", "calm", {"threshold_decay": None})


def test_later_stages_begin_with_earlier_ones(run: Path, tmp_path: Path) -> None:
    """The unit of confidence is new in its stage, and alone learns; an untrained plain model will do as a beginning."""
    second = trained(
        tmp_path / "unit", "calm", {"confidence": "classifier", "threshold_decay": None}, init_from=str(run)
    )
    before, after = (mf.load(folder).state_dict() for folder in (run, second))
    new = set(after) - set(before)
    assert new == {"decoder.rule.leave.weight", "decoder.rule.leave.bias"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["decoder.rule.leave.bias"].any()
    plain = trained(tmp_path / "plain", "transformer", {"norm_order": "pre"})
    words = {"norm_order": "pre", "predictor": "multinomial", "classifier_sharing": "shared"}
    third = trained(tmp_path / "da", "depth-adaptive-transformer", words, init_from=str(plain))
    assert mf.load(third).spec.recipe == "depth-adaptive-transformer"
    # another rule leaves what it does not need behind
    fourth = trained(
        tmp_path / "own", "calm", {"classifier_sharing": "per-layer", "threshold_decay": None}, init_from=str(third)
    )
    assert "head.per_layer.0.weight" in mf.load(fourth).state_dict()


def test_a_later_stage_needs_an_earlier_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"predictions of a trained, frozen model.*give the folder.*init_from"):
        trained(tmp_path / "unit", "calm", {"confidence": "classifier", "threshold_decay": None})


def test_writing_tells_the_layers(run: Path) -> None:
    task = load_prompts(run, count=4, max_new=6).workload
    full, least = task.decode(None), task.decode(0.0)
    assert (full.layers, least.layers) == (3.0, 1.0)
    assert full.tokens_per_second > 0
    model: Any = task.model
    with exit_threshold(model, 0.02):
        actual = generate(model, task.prompts[:2], max_new=6).tokens
        layers = exit_layers(model, task.prompts[:2], actual)
    assert [len(row) for row in layers] == [len(row) for row in actual]
    assert isinstance(model.decoder, EarlyExit)
    assert model.decoder.rule.values == (0.9, 0.9)


def test_calibration_refuses_what_it_cannot_certify(run: Path) -> None:
    task = load_prompts(run, count=8, max_new=6).workload
    with pytest.raises(UserError, match=r"from 8 documents .* at a confidence of 0.95 needs at least 59 documents"):
        calibrate(task, tolerance=0.05)
    with pytest.raises(UserError, match=r"quality.* needs a reference"):
        calibrate(task, tolerance=0.5, confidence=0.5, risk="quality")
    with pytest.raises(UserError, match="2 documents for 8 prompts"):
        calibrate(task, tolerance=0.5, confidence=0.5, documents=[0, 1])
    model: Any = task.model
    with torch.no_grad():
        # the lower layers now say something else
        model.decoder.get_submodule("2").ff.inner.down.weight.normal_(std=9.0)
    with pytest.raises(UserError, match=r"no threshold can be certified: at 0 .*a larger tolerance: a mean loss above"):
        calibrate(DecodingWorkload(model, task.prompts, 6), tolerance=0.3, confidence=0.6, grid=(0.0,))


def test_prompts_of_a_document_count_once(run: Path) -> None:
    """20 prompts from each of 10 documents are 10 documents, not 200 independent losses."""
    texts = [f"{document} {prompt}" for document in range(10) for prompt in range(20)]
    task = DecodingWorkload(load_prompts(run, count=1).workload.model, texts, 3, rows=200)
    documents = [text.split()[0] for text in texts]
    with pytest.raises(UserError, match=r"come from 10 documents .* needs at least 59 documents"):
        calibrate(task, tolerance=0.05, documents=documents)
    certified = calibrate(task, tolerance=0.4, confidence=0.6, documents=documents, grid=(0.99,))
    assert (certified.documents, certified.prompts) == (10, 200)
    assert "over the draw of 10 documents (200 prompts" in certified.statement
    assert document_means([0.0, 1.0, 0.5], ["a", "a", "b"]) == [0.5, 0.5]


def test_commands(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(run), "--tolerance", "0.4", "--confidence", "0.6", "--documents", "4"]
    assert command(["calibrate", *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    file = run / "calibration.json"
    saved = ThresholdCalibration.read(file)
    assert (saved.threshold, saved.documents, saved.prompts) == (report["threshold"], 4, 4)
    assert "4 documents (4 prompts, from test of" in report["statement"]
    assert command(["calibrate", str(run), "--tolerance", "0.01", "--documents", "9"]) == 2
    assert "the prompts come from 9 documents" in capsys.readouterr().err
    table = tmp_path / "table"
    assert (
        command(
            [
                "calibrate",
                str(run),
                "--sweep",
                "--prompts",
                "3",
                "--values",
                "0.5",
                "--values",
                "0",
                "--out",
                str(table),
            ]
        )
        == 0
    )
    points = json.loads((table / "early-exit.json").read_text())
    assert [point["threshold"] for point in points] == [None, 0.5, 0.0]
    assert points[0]["consistency"] == 1.0
    assert points[2]["layers"] == 1.0
    assert (table / "early-exit.png").stat().st_size > 1000
    assert (table / "early-exit.md").read_text().count("\n") == 5
    capsys.readouterr()
    assert command(["calibrate", str(run), "--text", "1 2", "--answer", "one two", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["maximum"] == 3


def test_the_earlier_names_of_a_sweep_and_of_counts_work_and_name_the_new_ones(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = ["--prompts", "3", "--values", "0.5", "--out", str(tmp_path / "table"), "--json"]
    assert command(["thresholds", *table, str(run)]) == 0
    earlier = capsys.readouterr()
    assert earlier.err == "`manyformer thresholds` is now `manyformer calibrate --sweep`\n"
    assert [point["threshold"] for point in json.loads(earlier.out)] == [None, 0.5]
    assert command(["efforts", "--answer", "one two", str(run), "1 2"]) == 0
    earlier = capsys.readouterr()
    assert earlier.err == "`manyformer efforts RUN TEXT` is now `manyformer calibrate RUN --text TEXT`\n"
    assert command(["calibrate", str(run), "--text", "1 2", "--answer", "one two"]) == 0
    assert capsys.readouterr() == (earlier.out, "")
    assert command(["--help"]) == 0
    assert not {"thresholds", "efforts"} & {*capsys.readouterr().out.split()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("calibrate", "{run}", "--tolerance", "1.5"), "tolerance (1.5) must lie between 0 and 1"),
        (("calibrate", "{run}", "--tolerance", "0.1", "--confidence", "2"), "confidence (2.0) must lie between"),
        (("calibrate", "{run}-none", "--tolerance", "0.1"), "-none; "),
        (
            ("calibrate", "{run}", "--sweep", "--values", "nan", "--prompts", "2"),
            "a threshold (nan) must be at least 0",
        ),
        (("calibrate", "{run}", "--sweep", "--values", "-1", "--prompts", "2"), "a threshold (-1) must be at least 0"),
        (("calibrate", "{run}", "--sweep", "--values", "1", "--draws", "2"), "give either --values or --draws"),
        (("calibrate", "{run}-none", "--sweep"), "there is no folder"),
        (("thresholds", "{run}-none"), "there is no folder"),
        (("calibrate", "{run}"), "give one of these options"),
        (("calibrate", "{run}", "--sweep", "--text", "1 2"), "give one of these options"),
        (("calibrate", "{run}", "--sweep", "--confidence", "0.9"), "--confidence is for --tolerance: leave it out"),
        (("calibrate", "{run}", "--tolerance", "0.1", "--draws", "3"), "--draws is for --sweep: leave it out"),
        (("calibrate", "{run}", "--text", "1 2", "--batch", "3"), "--batch is for generated texts"),
        (("calibrate", "{run}", "{run}", "--text", "1 2"), "--text is for one run, and these are 2"),
    ],
)
def test_refused_before_anything_is_written_to(
    run: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(DecodingWorkload, "decode")
    assert command([word.format(run=run) for word in words]) == 2
    assert message in capsys.readouterr().err


def test_random_thresholds_are_shares_for_each_layer_but_the_last() -> None:
    thresholds = random_thresholds(3, 400, seed=1)
    assert {len(row) for row in thresholds} == {2}
    assert 0 <= min(map(min, thresholds)) < 0.02 < 0.98 < max(map(max, thresholds)) < 1
    assert random_thresholds(3, 400, seed=1) == thresholds != random_thresholds(3, 400, seed=2)


def test_the_best_of_each_cost_is_kept() -> None:
    def point(layers: float, consistency: float, bleu: float | None = None) -> ThresholdPoint:
        return ThresholdPoint("calm", 0.5, bleu, consistency, layers, 1.0)

    costly, cheap, better, worse = point(2.6, 0.9), point(1.0, 0.3), point(1.49, 0.7), point(1.2, 0.1)
    assert best_in_bins([costly, cheap, better, worse]) == [better, costly]
    assert best_in_bins([better, point(1.4, 0.99, bleu=0.2)]) == [better], "BLEU where it is known, else consistency"
    assert best_in_bins([cheap, better], width=0.25) == [cheap, better]
