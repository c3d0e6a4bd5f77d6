"""A calibration counts documents that the model has not seen, and is used only where its guarantee holds."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_exits import TINY, trained

import manyformer as mf
from editing import edit_record
from manyformer.base.errors import UserError
from manyformer.cli import run as command
from manyformer.config import RunConfig
from manyformer.inference.early_exit import (
    ThresholdCalibration,
    calibrate,
    load_calibration_prompts,
    load_prompts,
    use_calibration,
)
from manyformer.inference.generate import Decoding, Translator, decoding_from_options

WORDS = ["sea", "sun", "moon", "star", "wind", "rain", "snow", "fire", "lake", "hill", "tree", "leaf", "root", "seed"]


def text_of(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translation model with a certified threshold in its folder."""
    folder = trained(tmp_path_factory.mktemp("calibrated") / "calm", "calm", {"threshold_decay": None})
    prompts = load_calibration_prompts(folder, count=20)
    calibrate(
        prompts.workload, tolerance=0.4, confidence=0.6, documents=prompts.documents, grid=(0.5, 0.1, 0.03)
    ).write(folder / "calibration.json")
    return folder


def text_run(folder: Path, **data: Any) -> Path:
    """An early-exit language model of documents in lines, three of which are held out for testing."""
    train = [text_of(seed, 80) for seed in range(20)]
    # two copies of a document, a document with a training one inside, one that the run has never read
    test = [text_of(100, 300), text_of(100, 300), f"{text_of(101, 40)} {train[0]}", text_of(102, 300)]
    for name, texts in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    values = {
        "recipe": "early-exit-lm", "model": {"base_keywords": TINY},
        "data": {"path": str(folder / "train.jsonl"), "tokenizer": "char", "valid": 0.1, "length": 64, **data},
        "limits": {"steps": 2}, "batch": {"tokens": 512}, "evaluate": {"every": None}, "device": "cpu",
        "out": str(folder / "run"),
    }  # fmt: skip
    mf.train(RunConfig.model_validate(values), on_event=lambda event: None)
    return folder / "run"


def test_one_prompt_of_each_document_that_is_new(tmp_path: Path) -> None:
    folder = text_run(tmp_path, test=str(tmp_path / "test.jsonl"))
    prompts = load_calibration_prompts(folder)
    assert prompts.documents == [0, 3]
    assert [len(text) for text in prompts.workload.prompts] == [31, 31], "the first of 32 tokens is the start token"
    assert prompts.workload.prompts == [text_of(100, 300)[:31], text_of(102, 300)[:31]]
    assert prompts.source.endswith("2 left out as they are in other data of the run or copies of others")
    several = load_prompts(folder, split="test")
    assert set(several.documents) == {0, 1, 2, 3}
    texts = [text_of(100, 300), text_of(100, 300), "", text_of(102, 300)]
    pairs = list(zip(several.documents, several.workload.prompts))
    assert all(text in texts[document] for document, text in pairs if document != 2)
    with pytest.raises(UserError, match=r"from 2 documents .*needs at least 59 documents"):
        calibrate(prompts.workload, tolerance=0.05, documents=prompts.documents, source=prompts.source)


def test_a_run_without_test_data_needs_other_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = text_run(tmp_path)
    words = ["calibrate", str(folder), "--tolerance", "0.5", "--confidence", "0.5"]
    assert command(words) == 2
    assert "has no test data, and the checkpoint was chosen on its validation data" in capsys.readouterr().err
    assert load_calibration_prompts(folder, data=str(tmp_path / "test.jsonl")).documents == [0, 3]
    with pytest.raises(UserError, match=r"20 left out as they .*: there are no prompts"):
        load_calibration_prompts(folder, data=str(tmp_path / "train.jsonl"))
    assert command([*words, "--data", str(tmp_path / "test.jsonl"), "--max-new", "4"]) == 0
    capsys.readouterr()
    file = folder / "calibration.json"
    greedy = ["generate", str(folder), "sea", "--greedy", "--calibration", str(file)]
    assert command([*greedy, "--max-new", "4"]) == 0
    assert command(greedy) == 2
    assert "holds for greedy decoding with max_new 4, and this is max_new by default" in capsys.readouterr().err
    assert command(["generate", str(folder), "sea", "--seed", "1", "--max-new", "4", "--calibration", str(file)]) == 2
    assert "and this is sampling" in capsys.readouterr().err
    assert command(["evaluate", str(folder), "--calibration", str(file)]) == 2
    assert "the scores of a language model generate none" in capsys.readouterr().err
    shutil.rmtree(folder / "data")
    with pytest.raises(UserError, match="nobody knows whether the model has seen these texts"):
        load_calibration_prompts(folder, data=str(tmp_path / "test.jsonl"))


def test_texts_are_those_of_the_calibration(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A beam of width 1 is the greedy decoding that was calibrated."""
    file = run / "calibration.json"
    workload = load_calibration_prompts(run, count=20).workload
    calibration = ThresholdCalibration.read(file)
    expected = workload.decode(calibration.threshold)
    assert expected.layers < workload.decode(None).layers == 3, "no token leaves early"
    model: Any = mf.load(run)
    decoding = decoding_from_options(beam=1)
    use_calibration(model, file, decoding)
    translator = Translator(model, tokenizer=model.tokenizer, decoding=decoding)
    assert [answers[0].text for answers in translator(workload.prompts)] == expected.texts
    first = ["translate", str(run), workload.prompts[0], "--calibration", str(file)]
    assert command([*first, "--beam", "1"]) == 0
    assert capsys.readouterr().out == f"{expected.texts[0]}\n"
    assert command(first) == 2
    assert "and this is beam search of width 4: decode greedily" in capsys.readouterr().err
    assert command(["evaluate", str(run), "--beam", "1", "--calibration", str(file)]) == 0
    assert command(["evaluate", str(run), "--calibration", str(file)]) == 2
    assert command(["evaluate", str(run), "threshold=0.3", "--beam", "1", "--calibration", str(file)]) == 2
    assert "threshold=0.3 contradicts --calibration" in capsys.readouterr().err


def test_other_models_and_decodings_are_refused(run: Path) -> None:
    file = run / "calibration.json"
    model: Any = mf.load(run)
    for decoding, difference in (
        (Decoding(max_new=7), "max_new 7"),
        (Decoding(stop=("x",)), "decoding with stop"),
        (decoding_from_options(repetition_penalty=1.2), "decoding with processors"),
    ):
        with pytest.raises(UserError, match=f"holds for greedy decoding .* and this is {difference}"):
            use_calibration(model, file, decoding)
    with pytest.raises(UserError, match="other weights or another exit rule"):
        use_calibration(mf.load(run, keywords={"confidence": "saturation"}), file, Decoding())
    use_calibration(mf.load(run, keywords={"threshold": 0.2}), file, Decoding())
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    with pytest.raises(UserError, match="other weights or another exit rule"):
        use_calibration(model, file, Decoding())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("threshold", 0.01, "the tests do not certify the threshold 0.01"),
        ("documents", 30, "does not follow from its mean loss"),
        ("documents", 10**15, "documents"),
        ("tolerance", 2.0, "tolerance"),
        ("risk", "none", "risk"),
        ("tested", [], "tested"),
        ("model", "../../x", "model"),
        ("format", 99, "was written in format 99 by manyformer"),
    ],
)
def test_a_changed_calibration_is_refused(run: Path, tmp_path: Path, field: str, value: Any, message: str) -> None:
    file = tmp_path / "calibration.json"
    shutil.copy2(run / "calibration.json", file)
    edit_record(file, lambda content: content.update({field: value}))
    with pytest.raises(UserError, match=f"calibration.json .*{message}"):
        use_calibration(mf.load(run), file, Decoding())


def test_a_flipped_bit_of_a_calibration_is_noticed(run: Path, tmp_path: Path) -> None:
    content = (run / "calibration.json").read_bytes()
    file, model = tmp_path / "calibration.json", mf.load(run)
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 4
        file.write_bytes(changed)
        with pytest.raises(UserError, match=r"calibration\.json "):
            use_calibration(model, file, Decoding())
