"""Opening data: what is held out, what is counted, what is kept for the next time, and what is refused."""

import gzip
import json
import os
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from editing import edit_record
from manyformer.base.errors import UserError
from manyformer.base.files.verified_folder import write_manifest
from manyformer.config import DataSection, LabelsData, PairsData, TextData
from manyformer.data import OpenedData, load_tokenizers, open_data
from manyformer.data.storage.cache_folder import load_prepared
from manyformer.data.text import open_text
from manyformer.data.text.text_preparation import HoldoutSplitter
from manyformer.data.text.text_sources import TextPart
from manyformer.data.tokenizers.native_tokenizers import BPETokenizer
from manyformer.nn.batches import IGNORE_INDEX

TASKS = {"text": "next-token", "pairs": "pairs", "labels": "labelled"}


def opened(config: DataSection, cache: Path, *, batch_tokens: int = 64, **more: Any) -> OpenedData:
    return open_data(config, TASKS[config.kind], batch_tokens=batch_tokens, cache=cache, seed=0, **more)


def document(number: int) -> str:
    return f"Document {number}: " + "größe und 日本 " * (number % 7 + 1) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "corpus"
    place.mkdir()
    for number in range(40):
        (place / f"{number:02}.txt").write_text(document(number))
    return place


def shard_text(cache: Path, name: str, data: OpenedData) -> list[str]:
    # a small vocabulary takes a byte a token
    size = "u1" if data.target.vocab <= 256 else "<u2"
    tokens, offsets = np.memmap(cache / f"{name}.tokens", size), np.memmap(cache / f"{name}.offsets", "<i8")
    documents = [tokens[a:b].tolist() for a, b in pairwise(offsets)]
    assert all((ids[0], ids[-1]) == (1, 2) and min(ids[1:-1]) >= 5 for ids in documents)
    return [data.target.decode(ids) for ids in documents]


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
@pytest.mark.parametrize("packing", ["concat", "documents", "contiguous"])
def test_units_are_exact(tokenizer: Any, packing: Any, folder: Path, tmp_path: Path) -> None:
    vocab = 300 if tokenizer == "bpe" else None
    config = TextData(path=str(folder), valid=0.3, length=16, tokenizer=tokenizer, vocab=vocab, packing=packing)
    data = opened(config, tmp_path / "run")
    assert data.valid.units is not None
    assert sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in data.valid) == data.valid.units.targets
    texts = {name: shard_text(tmp_path / "run", name, data) for name in ("train", "valid")}
    full = [document(number) for number in range(40) if document(number) in texts["valid"]]
    assert sorted(texts["train"] + texts["valid"]) == sorted(map(document, range(40)))
    assert data.valid.units.characters == sum(map(len, full))
    assert data.valid.units.bytes == sum(len(text.encode()) for text in full)
    share = data.valid.units.characters / sum(len(document(number)) for number in range(40))
    assert 0.3 <= share < 0.6


@pytest.mark.parametrize("lengths", [[1000], [10, 900, 90], [0, 7]])
def test_of_few_documents_the_ends_are_held_out(lengths: list[int]) -> None:
    holdout = HoldoutSplitter(np.array(lengths), {"valid": 0.1, "test": 0.2})
    texts = ["".join(random.Random(n).choices("abc", k=n)) for n in lengths]
    parts = []
    for text in texts:
        pieces = [text[at : at + 33] for at in range(0, len(text), 33)] or [""]
        parts += [TextPart(piece, n == 0, n == len(pieces) - 1) for n, piece in enumerate(pieces)]
    actual: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for split, part in holdout.divide(parts):
        assert not part.ends_document
        if part.starts_document:
            actual[split].append("")
        actual[split][-1] += part.text
    for number, text in enumerate(text for text in texts if text):
        # the shares that were written, 7, 1 and 2 tenths, not the nearest numbers of two powers
        train, valid = 7 * len(text) // 10, len(text) // 10
        expected = [text[:train], text[train : train + valid], text[train + valid :]]
        stretches = [split[number] for split in actual.values() if len(split) > number]
        assert stretches == [stretch for stretch in expected if stretch]


def test_documents_are_held_out_whole_and_by_share() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    holdout = HoldoutSplitter(lengths, {"valid": 0.05, "test": 0.1})
    kinds = [piece.split for piece in holdout.divide(TextPart("x" * n, True, True) for n in lengths)]
    shares = {name: lengths[np.array(kinds) == name].sum() / lengths.sum() for name in ("valid", "test")}
    assert shares == {"valid": pytest.approx(0.05, abs=0.002), "test": pytest.approx(0.1, abs=0.002)}


def test_what_was_prepared_is_used_again_and_only_while_it_fits(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    config = TextData(path=str(folder), length=16, valid=0.2)
    first = opened(config, tmp_path / "run", log=said.append)
    opened(config.model_copy(update={"length": 8, "packing": "concat"}), tmp_path / "run", log=said.append)
    assert len(said) == 1
    manifest = json.loads((tmp_path / "run" / "prepared.json").read_text())
    assert len(manifest["sources"]) == 40
    assert manifest["splits"]["train"]["sha256"] != manifest["splits"]["valid"]["sha256"]
    # A damaged or changed file, or other settings: made again, not trusted.
    tokens = tmp_path / "run" / "train.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    again = opened(config, tmp_path / "run", log=said.append)
    assert len(said) == 3
    assert "train.tokens is damaged: it has " in said[1]
    assert said[1].endswith("; preparing the data again")
    assert (next(again.train).tokens == next(first.train).tokens).all()
    (folder / "00.txt").write_text("something new")
    opened(config, tmp_path / "run", log=said.append)
    opened(config.model_copy(update={"tokenizer": "char"}), tmp_path / "run", log=said.append)
    assert len(said) == 5
    # Nothing half-written stays behind.
    assert not [name for name in os.listdir(tmp_path / "run") if name.endswith(".part")]


def test_data_that_a_model_was_trained_on_is_not_replaced_by_other_data(folder: Path, tmp_path: Path) -> None:
    config = TextData(path=str(folder), length=16, valid=0.2, tokenizer="char")

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.name[0] != "."}

    opened(config, tmp_path / "run")
    before = files()
    for text in ("other letters: \N{GREEK SMALL LETTER ALPHA}", "old letters"):
        (folder / "00.txt").write_text(text)
        with pytest.raises(UserError, match="the data differs from what this run was trained on"):
            opened(config, tmp_path / "run", belongs_to_model=True)
        assert files() == before
    # a file that has been touched holds the same data
    (folder / "00.txt").write_text("something else")
    first = opened(config, tmp_path / "again")
    os.utime(folder / "00.txt", (1, 1))
    again = opened(config, tmp_path / "again", belongs_to_model=True)
    assert again.train.state_dict() == first.train.state_dict()


def test_equal_numbers_of_another_alphabet_are_other_data(tmp_path: Path) -> None:
    def fingerprint(letters: str) -> str:
        (tmp_path / "text.txt").write_text(letters * 400)
        data = opened(TextData(path=str(tmp_path / "text.txt"), length=16, tokenizer="char"), tmp_path / letters)
        return data.train.state_dict()["data"]

    assert fingerprint("abc") != fingerprint("bcd")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "O", r"splits\.train\.dtype: input should be 'uint8', 'uint16' or 'uint32', got 'O'"),
        ("tokens", -1, r"splits\.train\.tokens: input should be greater than or equal to 0"),
        ("tokens", 10**15, r"train\.tokens is damaged: 1,000,000,000,000,000 tokens in \d+ documents take"),
        ("documents", 0, r"train\.offsets is damaged: [\d,]+ tokens in 0 documents take 8 bytes"),
        ("dtype", "uint32", r"train\.tokens is damaged: .* take 13,340 bytes, and it has 6,670"),
        ("largest", 7, r"train\.tokens is damaged: its largest token is not 7"),
    ],
)
def test_hostile_facts_of_a_shard_are_refused(
    field: str, value: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    """As by somebody who also writes the sums, so that they agree."""
    opened(TextData(path=str(folder), length=16), tmp_path)
    edit_record(tmp_path / "prepared.json", lambda content: content["splits"]["train"].update({field: value}))
    write_manifest(tmp_path)
    with pytest.raises(UserError, match=message):
        load_prepared(tmp_path)


def test_hostile_offsets_are_refused(folder: Path, tmp_path: Path) -> None:
    opened(TextData(path=str(folder), length=16), tmp_path)
    offsets = np.fromfile(tmp_path / "train.offsets", np.int64)
    offsets[3] = 10**12
    offsets.tofile(tmp_path / "train.offsets")
    write_manifest(tmp_path)
    with pytest.raises(UserError, match=r"train\.offsets is damaged: offsets of documents must ascend from 0 to"):
        load_prepared(tmp_path)


def test_preparing_streams(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = opened(TextData(path=str(folder), length=16, valid=0.2), tmp_path / "one")
    monkeypatch.setattr(BPETokenizer, "block_characters", 50)
    parts = opened(TextData(path=str(folder), length=16, valid=0.2), tmp_path / "two")
    assert (next(full.train).tokens == next(parts.train).tokens).all()
    shard = np.memmap(tmp_path / "two" / "train.tokens", dtype="<u2")
    assert len(shard) == json.loads((tmp_path / "two" / "prepared.json").read_text())["splits"]["train"]["tokens"]


@pytest.mark.parametrize("lines", [True, False])
def test_files_larger_than_memory(lines: bool, tmp_path: Path) -> None:
    """Preparing and using a file takes a small and constant part of its size."""
    text = ("0123456789abcde" + "\n" * lines) * 2**16
    with (tmp_path / "large.txt").open("w") as file:
        file.writelines(text for _ in range(48))
    config = TextData(path=str(tmp_path / "large.txt"), length=256, valid=0.01, packing="concat")
    tracemalloc.start()
    data = opened(config, tmp_path / "run", batch_tokens=8192)
    next(data.train)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data.valid.units is not None
    assert data.valid.units.characters == pytest.approx(0.01 * 48 * len(text), abs=1)
    assert peak < 48 * len(text) / 2


def test_no_source_is_in_two_splits(tmp_path: Path) -> None:
    pick = random.Random(0)
    # Few sources, each many times, in different capitals and with different targets.
    rows = [f"{pick.choice(['Source', 'source'])} {pick.randrange(60)}\ttarget {n}\n" for n in range(600)]
    (tmp_path / "pairs.tsv").write_text("".join(rows))
    data = opened(PairsData(path=str(tmp_path / "pairs.tsv"), tokenizer="char", valid=0.2), tmp_path / "run")
    held = [one.source.casefold() for one in data.examples("valid")]
    train = set()
    while data.train.epoch == 0:
        train |= {data.source.decode(row.tolist()).casefold() for row in next(data.train).source}
    assert held
    assert not train & set(held)
    assert train | set(held) == {row.split("\t")[0].casefold() for row in rows}


def test_separate_vocabularies_and_what_a_run_keeps(tmp_path: Path) -> None:
    for side, word in (("en", "dog"), ("de", "Hündin")):
        (tmp_path / f"train.{side}.gz").write_bytes(gzip.compress("".join(f"{word} {n}\n" for n in range(99)).encode()))
    paths = (str(tmp_path / "train.en.gz"), str(tmp_path / "train.de.gz"))
    data = opened(PairsData(path=paths, valid=paths, shared=False, tokenizer="char"), tmp_path / "run")
    assert data.required_keywords == {
        "vocab": 5 + len({*"Hündin 0123456789"}),
        "source_vocab": 5 + len({*"dog 0123456789"}),
    }
    data.save(tmp_path / "model")
    write_manifest(tmp_path / "model")
    kept = load_tokenizers(tmp_path / "model")
    assert kept.source.encode("dog 7") == data.source.encode("dog 7")
    assert kept.target.encode("Hündin 7") == data.target.encode("Hündin 7")
    assert [one.source for one in data.examples("valid")] == [f"dog {n}" for n in range(99)]


def test_labels_are_numbered_and_long_texts_cut(tmp_path: Path) -> None:
    lines = ["text\tlabel\n"] + [f"{'word ' * (n % 30)}{n}\tclass {n % 4}\n" for n in range(200)]
    (tmp_path / "labels.tsv").write_text("".join(lines))
    config = LabelsData(path=str(tmp_path / "labels.tsv"), text="text", label="label", tokenizer="byte", max_length=50)
    data = opened(config, tmp_path / "run", batch_tokens=500)
    assert data.required_keywords == {"vocab": 261, "classes": 4}
    assert data.labels == ("class 0", "class 1", "class 2", "class 3")
    assert any("texts cut at 50 tokens" in line for line in data.describe())
    for batch in data.valid:
        for row, label in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
            ids = [token for token in row if token]
            assert (ids[0], ids[-1]) == (1, 2)
            assert len(ids) <= 50
            text = data.source.decode(ids)
            if len(ids) < 50:
                assert int(text.split()[-1]) % 4 == label


def refused(config: DataSection, cache: Path, sentence: str, **more: Any) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        opened(config, cache, **more)
    assert "\n" not in str(caught.value)


def test_text_that_will_not_do(folder: Path, tmp_path: Path) -> None:
    config, cache = TextData(path=str(folder), length=16, valid=0.2), tmp_path / "run"
    refused(config, cache, r"training text has [\d,]+ tokens, fewer than one batch of 1,000,000", batch_tokens=10**6)
    refused(config, cache, r"batch\.tokens is 8, less than one row of 16", batch_tokens=8)
    refused(
        config, cache, r"a row \(data\.length\) has 16 tokens, but the model allows 12; set data", model_max_length=12
    )
    opened(config, cache, model_max_length=16)
    refused(config.model_copy(update={"valid": str(tmp_path / "no.txt")}), cache, r"no\.txt: there is no such file")
    (tmp_path / "tiny.txt").write_text("abc")
    refused(config.model_copy(update={"path": str(tmp_path / "tiny.txt")}), cache, "fewer than one batch of 64")
    (tmp_path / "blank.jsonl").write_text('{"text": "x"}\n{"text": ""}\n')
    assert len(list(open_text.text_sources(str(tmp_path / "blank.jsonl"), None, cache)[0].parts())) == 1
    with pytest.raises(UserError, match=r"data of kind text has no form 'pairs'; known: masked, next-token"):
        open_data(config, "pairs", batch_tokens=64, cache=cache, seed=0)


def test_pairs_that_will_not_do(tmp_path: Path) -> None:
    path, cache = tmp_path / "pairs.tsv", tmp_path / "run"
    path.write_text("".join(f"source {n}\ttarget {n}\n" for n in range(100)) + f"{'x' * 150}\tlong\n\tno source\n")
    (tmp_path / "held.tsv").write_text("a\tb\nc\t" + "d" * 70 + "\n")
    config = PairsData(path=str(path), valid=str(tmp_path / "held.tsv"), tokenizer="byte")
    data = opened(config, cache)
    assert "100 pairs" in data.describe()[2]
    assert "1 of 101 pairs left out at 128 tokens on a side (data.max_length)" in data.describe()
    refused(config, cache, "the 100 training pairs have .* fewer than one batch of 9,000", batch_tokens=9000)
    refused(config, cache, "longest training pair has 10 tokens on a side, more than a batch of 9", batch_tokens=9)
    refused(
        config.model_copy(update={"max_length": 3}), cache, r"no training pair is as short as data\.max_length allows"
    )
    held = (
        r"the longest valid pair \(.*held\.tsv:2\) has 71 tokens, but the model allows 40; no held-out pair is left out"
    )
    refused(config, cache, held, model_max_length=40)
    refused(config, cache, "the longest training pair has 10 tokens, but the model allows 9", model_max_length=9)
    path.write_text("")
    refused(config, cache, r"pairs\.tsv: there are no rows in it \(data\.path\)")
    path.write_text("a\tb\n")
    refused(
        config.model_copy(update={"valid": 0.001}),
        cache,
        r"too few rows to hold out 0\.001 of them; give data\.valid=FILE",
    )
    refused(config.model_copy(update={"path": str(tmp_path)}), cache, "this is a folder; give a TSV, CSV or JSONL file")
    assert not [name for name in os.listdir(cache) if name.endswith(".part")]


def test_labels_that_will_not_do(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("".join(f"text {n}\t{'good' if n % 2 else 'bad'}\n" for n in range(50)))
    (tmp_path / "b.tsv").write_text("text\tgoof\n")
    (tmp_path / "one.tsv").write_text("text 1\tgood\ntext 2\tgood\n")
    path, cache = str(tmp_path / "a.tsv"), tmp_path / "run"
    config = LabelsData(path=path, valid=str(tmp_path / "b.tsv"), tokenizer="byte")
    refused(config, cache, r"b\.tsv:1: the label 'goof' does not occur in the training data; did you mean good\?")
    fine = config.model_copy(update={"valid": path})
    refused(fine, cache, "the longest text has 9 tokens, but the model allows 6", model_max_length=6)
    refused(fine, cache, "the 50 training texts have 440 tokens, fewer than one batch of 1,000", batch_tokens=1000)
    refused(fine, cache, "the longest training text has 9 tokens, more than a batch of 8", batch_tokens=8)
    single = config.model_copy(update={"path": str(tmp_path / "one.tsv"), "valid": str(tmp_path / "one.tsv")})
    refused(single, cache, "all training texts have the label 'good'; a classifier needs at least two labels")
