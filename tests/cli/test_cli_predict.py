"""`predict`: texts, words, images and recordings labelled from the command line; what has no labels is refused."""

import gzip
import json
import os
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from commands import Cli
from PIL import Image

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.inference.evaluate import predict
from manyformer.models import ImageClassifier
from manyformer.models.tasks.text_labels import ROWS_PER_BATCH
from manyformer.nn.batches import ImageClassificationBatch
from manyformer.training import silent, train

TEXTS = ["red tan sun", "box", "oak oak oak"]


def probabilities_by_hand(run: Path) -> list[dict[str, float]]:
    """The probability of each label of each text, computed one text at a time."""
    model, names = mf.load(run), json.loads((run / "model" / "labels.json").read_text())
    rows = [torch.tensor([[1, *model.tokenizer.encode(text), 2]]) for text in TEXTS]
    return [dict(zip(names, model(row).logits[0].softmax(-1).tolist())) for row in rows]


def test_a_line_is_labelled_with_its_probability(
    cli: Cli, labels_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    result = cli("predict", str(labels_run), str(tmp_path / "texts.txt"), "--top", "2")
    assert result.code == 0, result.err
    rows = [line.split("\t") for line in result.out.splitlines()]
    for row, expected in zip(rows, probabilities_by_hand(labels_run), strict=True):
        best = max(expected, key=lambda label: expected[label])
        assert row[0] == best
        assert {row[0]: float(row[1]), row[2]: float(row[3])} == pytest.approx(expected, abs=1e-4)
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO((tmp_path / "texts.txt").read_bytes())))
    one_label = cli("predict", str(labels_run)).out.splitlines()
    assert one_label == ["\t".join(row[:2]) for row in rows]


def test_a_table_is_read_as_training_reads_it(cli: Cli, labels_run: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    expected = cli("predict", str(labels_run), str(tmp_path / "plain.txt")).out
    answers = [line.split("\t")[0] for line in expected.splitlines()]
    labels = [answers[0], "late" if answers[1] == "early" else "early", answers[2]]
    tables = {
        "a.tsv": "".join(f"{text}\t{label}\n" for text, label in zip(TEXTS, labels)),
        "b.csv": "label,text\n" + "".join(f'{label},"{text}"\n' for text, label in zip(TEXTS, labels)),
        "c.csv": "text\n" + "".join(f"{text}\n" for text in TEXTS),
    }
    for name, content in tables.items():
        (tmp_path / name).write_text(content)
        ended = cli("predict", str(labels_run), str(tmp_path / name))
        assert ended.out == expected
        assert ("2 of 3 labels in" in ended.err and "agree (66.7%)" in ended.err) == (name != "c.csv")
    records = cli("predict", str(labels_run), str(tmp_path / "b.csv"), "--json").out.splitlines()
    assert [json.loads(line)["expected"] for line in records] == labels
    assert [json.loads(line)["input"] for line in records] == TEXTS


def test_json_lines_are_answered_with_json_lines(cli: Cli, labels_run: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    records = [
        json.loads(line) for line in cli("predict", str(labels_run), str(tmp_path / "texts.jsonl")).out.splitlines()
    ]
    assert [record["input"] for record in records] == TEXTS
    for record, expected in zip(records, probabilities_by_hand(labels_run), strict=True):
        (label,) = record["labels"]
        assert label["probability"] == pytest.approx(max(expected.values()), abs=1e-5)
        assert expected[label["label"]] == max(expected.values())


def test_a_file_without_a_line_is_refused(cli: Cli, labels_run: Path, tmp_path: Path) -> None:
    for name in ("empty.csv", "empty.txt"):
        (tmp_path / name).write_bytes(b"")
        result = cli("predict", str(labels_run), str(tmp_path / name))
        assert (result.code, result.out) == (2, "")
        assert f"{name}: there is nothing to label in it" in result.err


def test_more_texts_than_a_batch_holds_keep_their_order(labels_run: Path, tmp_path: Path) -> None:
    texts = [TEXTS[number % 3] for number in range(150)]
    (tmp_path / "many.txt").write_text("".join(f"{text}\n" for text in texts))
    items = list(predict(labels_run, str(tmp_path / "many.txt"), device="cpu"))
    assert [item.input.name for item in items] == texts
    labels = [item.prediction[0][0].label for item in items]
    assert labels == labels[:3] * 50


@pytest.mark.timeout(60)
def test_the_first_lines_are_answered_while_the_pipe_is_open(labels_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, encoding="utf-8") as pipe, os.fdopen(writer, "w", encoding="utf-8") as source:
        monkeypatch.setattr(sys, "stdin", pipe)
        answers = predict(labels_run, "-", device="cpu")
        source.write("red tan sun\n" * ROWS_PER_BATCH)
        source.flush()
        first = [next(answers) for _ in range(ROWS_PER_BATCH)]
        source.write("box")
        source.close()
        (last,) = answers
    assert [item.input.name for item in [first[0], last]] == ["red tan sun", "box"]
    assert len({item.prediction for item in first}) == 1


def test_standard_input_may_be_gzipped_but_not_empty(labels_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(content: bytes) -> list[str]:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(content)))
        return [item.input.name for item in predict(labels_run, "-", device="cpu")]

    assert answers(gzip.compress(b"red\nbox\n")) == answers(b"\xef\xbb\xbfred\r\nbox") == ["red", "box"]
    with pytest.raises(UserError, match="nothing is piped in"):
        answers(b"")
    with pytest.raises(UserError, match="standard input, line 2: not UTF-8 at byte 0"):
        answers(b"red\n\xff\n")


def test_the_words_of_a_sentence_are_labelled_in_json(cli: Cli, trees_run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.conllu").write_text("1\tdogs\t_\t_\t_\t_\t2\t_\t_\t_\n2\tsee\t_\t_\t_\t_\t0\t_\t_\t_\n\n")
    result = cli("predict", str(trees_run), str(tmp_path / "a.conllu"), "--json", "--top", "2")
    record = json.loads(result.out)
    assert record["input"] == "dogs see"
    assert [word["word"] for word in record["words"]] == ["dogs", "see"]
    for word in record["words"]:
        first, second = (label["probability"] for label in word["labels"])
        assert 1 > first >= second > 0


def test_images_are_labelled_from_an_archive_a_folder_and_a_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (40, 4, 4), dtype=np.uint8)
    np.savez("a.npz", x=images, y=np.arange(40) % 2)
    words = [
        "data.path=a.npz",
        "batch.tokens=64",
        "dim=8",
        "depth=1",
        "heads=2",
        "patch=2",
        "limits.steps=2",
        "out=runs/a",
    ]
    train("vit", words, on_event=silent)
    model = mf.load("runs/a")
    assert isinstance(model, ImageClassifier)
    batch = ImageClassificationBatch(torch.from_numpy(images[:3, ..., None]), torch.zeros(3, dtype=torch.long))
    expected = ["01"[label] for label in model(batch.pixels).logits.argmax(-1).tolist()]
    np.savez("b.npz", x=images[:3])
    from_archive = [line.split("\t")[1] for line in cli("predict", "runs/a", "b.npz").out.splitlines()]
    assert from_archive == expected
    Path("pictures").mkdir()
    for number in range(3):
        Image.fromarray(images[number]).save(f"pictures/{number}.png")
    rows = [line.split("\t") for line in cli("predict", "runs/a", "pictures").out.splitlines()]
    assert [row[:2] for row in rows] == [[f"pictures/{number}.png", expected[number]] for number in range(3)]
    assert cli("predict", "runs/a", "pictures/1.png").out.split("\t")[:2] == ["pictures/1.png", expected[1]]


def test_what_predicts_no_labels_is_refused(cli: Cli, text_run: Path, pairs_run: Path, tmp_path: Path) -> None:
    for run, task, use in ((text_run, "language modelling", "generate"), (pairs_run, "translation", "translate")):
        result = cli("predict", str(run), "x.txt")
        assert result.code == 2
        assert f"predicts no labels, it is for {task}" in " ".join(result.err.split())
        assert f"use `manyformer {use} {run}`" in " ".join(result.err.split())


@pytest.mark.parametrize(("old", "new"), [("tag", "predict"), ("paint", "generate")])
def test_an_earlier_command_is_answered_with_the_new_one(cli: Cli, old: str, new: str) -> None:
    result = cli(old, "runs/a")
    assert result.code == 2
    assert f"`manyformer {old}` is now `manyformer {new}`" in result.err


def test_generate_refuses_options_of_the_wrong_kind(cli: Cli, text_run: Path) -> None:
    assert "generates text, and --complete is for images" in cli("generate", str(text_run), "a", "--complete", "2").err
    assert "--samples is 0, but there must be at least one text" in cli("generate", str(text_run), "--samples", "0").err


def write_tones(folder: Path) -> None:
    """Forty low and high tones of various lengths, in a folder for each label."""
    random = np.random.default_rng(0)
    for number in range(40):
        pitch = (400, 2000)[number % 2] * random.uniform(0.9, 1.1)
        times = np.arange(int(8000 * random.uniform(0.1, 0.2))) / 8000
        file = folder / ("low", "high")[number % 2] / f"{number}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(file, 0.3 * np.sin(2 * np.pi * pitch * times) + random.normal(0, 0.01, len(times)), 8000)


def test_a_run_learns_tones_and_labels_files(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tones(tmp_path / "tones")
    data = ["data.path=tones", "data.sample_rate=8000", "data.mels=8", "data.time_masks=1", "data.valid=0.3"]
    sizes = ["dim=8", "depth=1", "heads=2", "channels=4", "batch.tokens=64", "limits.steps=40", "out=runs/tones"]
    train("audio-transformer-classifier", [*data, *sizes, "optim.lr=0.01"], on_event=silent)
    result = cli("evaluate", "runs/tones", "--json")
    assert result.code == 0, result.err
    assert '"accuracy"' in result.out
    for number, pitch in enumerate((410, 1900)):
        tone = 0.3 * np.sin(2 * np.pi * pitch * np.arange(2400) / 16_000)
        soundfile.write(tmp_path / f"{number}.flac", np.stack([tone, tone], 1), 16_000)
    result = cli("predict", "runs/tones", "0.flac")
    assert result.code == 0, result.err
    assert result.out.split("\t")[:2] == ["0.flac", "low"]
    assert "1 recording resampled from 16,000 Hz to 8,000 Hz (first: " in result.err
    assert "1 recording with channels averaged (first: 0.flac)" in result.err
    assert cli("predict", "runs/tones", "1.flac").out.split("\t")[1] == "high"
    model = mf.load("runs/tones")
    assert model.tokenizer is not None
    (tmp_path / "2.wav").write_bytes((tmp_path / "tones" / "low" / "0.wav").read_bytes()[:500])
    result = cli("predict", "runs/tones", "2.wav")
    assert result.code == 2
    assert "2.wav: this file is incomplete" in result.err
    assert "runs/tones on tones" in cli("evaluate", "runs/tones", "--data", "tones").out
