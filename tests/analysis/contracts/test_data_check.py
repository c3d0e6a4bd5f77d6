"""Overlaps, duplicates, damage and labels are planted in small files, and found where they are."""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyformer as mf
from manyformer.analysis.contracts.data_check import BOILERPLATE, HashTable, KnownHashes
from manyformer.analysis.contracts.data_records import hash_words, input_and_label, window_hashes
from manyformer.base.errors import UserError

DRAW = random.Random(0)
WORDS = [f"word{index}" for index in range(2000)]


def text(words: int = 30) -> str:
    return " ".join(DRAW.choice(WORDS) for _ in range(words))


TRAIN = [text() for _ in range(200)]
TEST = [text() for _ in range(50)]
LABELS = ["positive", "negative"]


def write_json(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write(folder: Path, name: str, texts: Sequence[str]) -> Path:
    """Texts in the format that the ending of the name says."""
    path = folder / name
    if path.suffix == ".jsonl":
        return write_json(path, [{"text": each, "label": DRAW.choice(LABELS)} for each in texts])
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(["text", "label"])
            writer.writerows([each, DRAW.choice(LABELS)] for each in texts)
        return path
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


FORMATS = ["txt", "jsonl", "csv"]


@pytest.mark.parametrize("ending", FORMATS)
def test_sound_data_are_called_faulty(tmp_path: Path, ending: str) -> None:
    report = mf.check_data(write(tmp_path, f"train.{ending}", TRAIN), write(tmp_path, f"test.{ending}", TEST))
    assert report.ok, report
    assert report["overlap"].verdict == report["overlap-ngrams"].verdict == "passed"


@pytest.mark.parametrize("ending", FORMATS)
def test_a_test_text_in_the_training_data_is_missed(tmp_path: Path, ending: str) -> None:
    """In capitals, with other spaces and punctuation: it is the same text."""
    texts = [*TEST]
    texts[7] = TRAIN[31].upper().replace(" ", "  ") + "!"
    report = mf.check_data(write(tmp_path, f"train.{ending}", TRAIN), write(tmp_path, f"test.{ending}", texts))
    header = ending == "csv"
    places = f"test.{ending}:{8 + header} is train.{ending}:{32 + header}"
    assert report["overlap"].verdict == "failed"
    assert places in report["overlap"].sentence
    assert report["overlap"].measured == pytest.approx(1 / 50)


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize(("shared", "verdict"), [(13, "failed"), (12, "passed")])
def test_thirteen_words_in_succession_are_missed(tmp_path: Path, ending: str, shared: int, verdict: str) -> None:
    texts = [*TEST]
    texts[9] = " ".join([text(5), *TRAIN[3].split()[4 : 4 + shared], text(8)])
    report = mf.check_data(write(tmp_path, f"train.{ending}", TRAIN), write(tmp_path, f"test.{ending}", texts))
    assert report["overlap-ngrams"].verdict == verdict, report
    assert report["overlap"].verdict == "passed"


def test_words_behind_the_end_of_a_block_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thirteen words stand on two lines, of which one ends a block that is read at once."""
    monkeypatch.setattr("manyformer.analysis.contracts.data_records.BLOCK_BYTES", 64)
    words = TRAIN[8].split()
    report = mf.check_data(
        write(tmp_path, "train.txt", TRAIN), write(tmp_path, "test.txt", [" ".join(words[:9]), " ".join(words[9:18])])
    )
    assert "test.txt:1 in train.txt:9" in report["overlap-ngrams"].sentence


def test_boilerplate_is_taken_for_an_overlap(tmp_path: Path) -> None:
    header = text(20)
    train = [line for each in TRAIN for line in (header, each)]
    report = mf.check_data(write(tmp_path, "train.txt", train), write(tmp_path, "test.txt", [header, *TEST]))
    assert report.ok, report
    assert "boilerplate" in report["overlap"].sentence
    assert "boilerplate" in report["duplicates"].sentence
    # a record that training repeats is an overlap all the same
    repeated = [*TRAIN, *[TEST[0]] * (BOILERPLATE + 5)]
    records = mf.check_data(write(tmp_path, "train.jsonl", repeated), write(tmp_path, "test.jsonl", TEST))
    assert records["overlap"].verdict == records["overlap-ngrams"].verdict == "failed"


def test_duplicates_are_missed(tmp_path: Path) -> None:
    report = mf.check_data(write(tmp_path, "train.jsonl", [*TRAIN, TRAIN[4], TRAIN[4]]))
    assert report["duplicates"].verdict == "failed"
    assert "2 of 202 training records" in report["duplicates"].sentence
    assert "train.jsonl:5, train.jsonl:201, train.jsonl:202" in report["duplicates"].sentence
    assert mf.check_data(tmp_path / "train.jsonl", allowed_duplicates=0.02)["duplicates"].verdict == "passed"


def test_damaged_and_empty_rows_are_missed(tmp_path: Path) -> None:
    path = write_json(tmp_path / "train.jsonl", [{"text": each} for each in ["one two", "", " - ", "three"]])
    with path.open("ab") as stream:
        stream.write(b'{"text": "\xff"}\n{"text": "cut')
    report = mf.check_data(path)
    assert report["readable"].measured == pytest.approx(2 / 6)
    assert "train.jsonl:5: byte 0xff is no UTF-8" in report["readable"].sentence
    assert "2 of 6 training rows (33%) have no word, first train.jsonl:2" in report["not-empty"].sentence


def test_damaged_text_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"good line\n\nGr\xfc\xdfe\nzero \0 byte\n")
    report = mf.check_data(path)
    assert "2 of 4 training rows (50%) are damaged, first train.txt:3: byte 0xfc is no UTF-8" in str(report)
    # empty lines separate paragraphs
    assert report["not-empty"].verdict == "passed"


def labeled(how: str) -> list[dict[str, str]]:
    rows = []
    for index in range(200):
        label = DRAW.choice(LABELS)
        words = [text(12)]
        if how == "marked" and index % 20 == 0:
            words.append(f"Label: {label}")
        if how == "contained":
            words.append(label)
        if how == "chance":
            words.append(DRAW.choice(LABELS))
        rows.append({"text": " ".join(words), "label": label})
    return rows


@pytest.mark.parametrize(
    ("how", "verdict"), [("plain", "passed"), ("chance", "passed"), ("contained", "failed"), ("marked", "failed")]
)
def test_labels_within_inputs_are_told_wrongly(tmp_path: Path, how: str, verdict: str) -> None:
    report = mf.check_data(write_json(tmp_path / "train.jsonl", labeled(how)))
    assert report["labels"].verdict == verdict, report


def test_answers_that_are_passages_of_the_input_are_called_a_leak(tmp_path: Path) -> None:
    rows = [{"context": each, "answer": each.split()[5]} for each in TRAIN]
    assert mf.check_data(write_json(tmp_path / "train.jsonl", rows))["labels"].verdict == "passed"


@pytest.mark.parametrize("ending", ["npy", "bin"])
@pytest.mark.parametrize(("shared", "verdict"), [(50, "failed"), (49, "passed")])
def test_fifty_tokens_in_succession_are_missed(tmp_path: Path, ending: str, shared: int, verdict: str) -> None:
    generator = np.random.default_rng(0)
    train = generator.integers(1, 60_000, 3000, dtype=np.uint16)
    test = generator.integers(1, 60_000, 500, dtype=np.uint16)
    test[100 : 100 + shared] = train[1000 : 1000 + shared]
    for name, tokens in (("train", train), ("test", test)):
        if ending == "npy":
            np.save(tmp_path / f"{name}.npy", tokens)
        else:
            tokens.tofile(tmp_path / f"{name}.bin")
    report = mf.check_data(tmp_path / f"train.{ending}", tmp_path / f"test.{ending}")
    assert report["overlap-ngrams"].verdict == verdict
    if verdict == "failed":
        assert f"test.{ending}:101 in train.{ending}:1001" in report["overlap-ngrams"].sentence


def test_rows_of_tokens_are_not_compared(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    train = generator.integers(0, 1000, (60, 16))
    test = generator.integers(0, 1000, (10, 16))
    test[3] = train[40]
    np.save(tmp_path / "train.npy", train)
    np.save(tmp_path / "test.npy", test)
    report = mf.check_data(tmp_path / "train.npy", tmp_path / "test.npy")
    assert "test.npy:4 is train.npy:41" in report["overlap"].sentence


def test_a_full_table_loses_what_it_says_it_keeps(tmp_path: Path) -> None:
    """Of more n-grams than fit a share is kept by their hashes, the same of both sides, and the report says which."""
    texts = [*TEST[:25], *TRAIN[:25]]
    report = mf.check_data(
        write(tmp_path, "train.txt", TRAIN), write(tmp_path, "test.txt", texts), table_size=300, only=["overlap-ngrams"]
    )
    row = report["overlap-ngrams"]
    assert row.verdict == "failed"
    # 50 lines of 30 words: 1,488 n-grams, of which an eighth fits
    assert "1 of 8 n-grams was looked up" in row.sentence
    table = HashTable(100)
    generator = np.random.default_rng(0)
    hashes = generator.integers(0, 2**64, 1000, dtype=np.uint64)
    table.add(hashes, np.arange(1000))
    table.sort()
    assert table.hashes.size <= 100
    assert table.step == 16
    known = KnownHashes(table)
    known.look_up(hashes, np.arange(1000) + 5)
    assert (known.seen == 1).all()
    assert all(known.place_of(value) == row + 5 for value, row in zip(table.hashes, table.rows, strict=True))


def test_words_are_split_otherwise_than_by_hand() -> None:
    """As a plain loop over characters splits them, with ideographs alone."""
    sample = "Don’t split—naïve CAFÉ: 数学 and 論a3 x_y, 한글\nnext line"
    expected = [
        "don",
        "t",
        "split",
        "naïve",
        "cafÉ",
        "数",
        "学",
        "and",
        "論",
        "a3",
        "x",
        "y",
        "한",
        "글",
        "next",
        "line",
    ]
    words, lines = hash_words(sample.encode())
    assert words.size == len(expected)
    alone = [int(hash_words(word.encode())[0][0]) for word in expected]
    assert words.tolist() == alone
    assert len(set(alone)) == len(alone)
    assert lines.tolist() == [0] * 14 + [1] * 2


@pytest.mark.parametrize("size", [1, 2, 13, 50])
def test_equal_windows_have_other_hashes(size: int) -> None:
    words = np.random.default_rng(0).integers(0, 2**64, 60, dtype=np.uint64)
    moved = np.concatenate([words[7:], words[:7]])
    hashes = window_hashes(words, size)
    assert hashes.size == 60 - size + 1
    assert np.array_equal(hashes[7:], window_hashes(moved, size)[: hashes.size - 7])
    assert np.unique(hashes).size == hashes.size


def test_the_input_of_a_record_holds_its_label() -> None:
    assert input_and_label({"question": "who", "label": 1, "passage": "p"}) == ("who p", "1")
    assert input_and_label({"text": "", "label": "a"}) == ("", "a")
    assert input_and_label({"messages": [{"content": "hi"}], "output": "ho"}) == ("hi", "ho")
    assert input_and_label("plain") == ("plain", None)


def test_files_of_other_kinds_are_left_out_in_silence(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", TRAIN[:5])
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    assert "1 files of other kinds not read" in mf.check_data(tmp_path).heading
    with pytest.raises(UserError, match=r"table.parquet is not read: write it as .jsonl or .csv"):
        mf.check_data(tmp_path / "table.parquet")
    with pytest.raises(UserError, match="there is no contract 'overlaps' of data; did you mean overlap"):
        mf.check_data(tmp_path / "a.txt", only=["overlaps"])
    np.save(tmp_path / "t.npy", np.arange(100))
    with pytest.raises(UserError, match="one of training and test data is text and the other tokens"):
        mf.check_data(tmp_path / "a.txt", tmp_path / "t.npy")
