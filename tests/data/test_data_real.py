"""On real text: tinyshakespeare as nanoGPT divides it, and Multi30k with BPE that gives its spaced text back."""

from pathlib import Path

import pytest

from manyformer.config import LabelsData, PairsData, TextData
from manyformer.data import open_data
from manyformer.data.text.text_files import read_lines
from real_data import shared_data


def test_tinyshakespeare_is_divided_as_everywhere(tmp_path: Path) -> None:
    path = shared_data("tinyshakespeare", "input.txt")
    config = TextData(path=str(path), tokenizer="char", packing="concat", valid=0.1, length=256)
    data = open_data(config, "next-token", batch_tokens=16_384, cache=tmp_path, seed=0)
    text = path.read_text()
    assert data.required_keywords == {"vocab": 65 + 5}
    assert data.valid.units is not None
    # The counts that nanoGPT's preparation prints.
    assert data.valid.units.characters == data.valid.units.targets == 111_540
    assert len(text) - 111_540 == 1_003_854
    held = text[1_003_854:]
    rows = [data.target.decode(row.tolist()) for batch in data.valid for row in batch.tokens]
    assert all(row in held for row in rows)
    first = next(data.train)
    assert first.tokens.shape == (64, 256)
    assert first.segments is None
    assert all(data.target.decode(row.tolist()) in text[:1_003_854] for row in first.tokens[:20])


@pytest.fixture(scope="module")
def multi30k(tmp_path_factory: pytest.TempPathFactory) -> tuple[PairsData, Path]:
    def sides(name: str) -> tuple[str, str]:
        return tuple(str(shared_data("multi30k", "tok", name.format(side))) for side in ("en", "de"))  # type: ignore[return-value]

    config = PairsData(
        path=sides("train.lc.norm.tok.{}.gz"),
        valid=sides("val.lc.norm.tok.{}"),
        test=sides("test_2016_flickr.lc.norm.tok.{}"),
    )
    return config, tmp_path_factory.mktemp("multi30k")


def test_multi30k(multi30k: tuple[PairsData, Path]) -> None:
    config, cache = multi30k
    data = open_data(config, "pairs", batch_tokens=4096, cache=cache, seed=0)
    assert data.required_keywords == {"vocab": 6000}
    for split, name, side, count in (
        ("valid", "val.lc.norm.tok.de", "target", 1014),
        ("test", "test_2016_flickr.lc.norm.tok.de", "target", 1000),
    ):
        texts = [line.text for line in read_lines(shared_data("multi30k", "tok", name))]
        assert len(texts) == count
        assert [getattr(one, side) for one in data.examples(split)] == texts
        assert [data.target.decode(data.target.encode(text)) for text in texts] == texts
    padded = filled = pairs = 0
    while data.train.epoch == 0:
        batch = next(data.train)
        padded += batch.source.numel() + batch.target.numel()
        filled += int((batch.source != 0).sum() + (batch.target != 0).sum())
        pairs += len(batch.source)
    assert pairs == 29_000
    assert filled / padded > 0.9


def test_clinc150(tmp_path: Path) -> None:
    train, valid = (str(shared_data("clinc150", name)) for name in ("train.tsv", "val.tsv"))
    config = LabelsData(path=train, valid=valid, text="text", label="intent", tokenizer="byte")
    data = open_data(config, "labelled", batch_tokens=8192, cache=tmp_path, seed=0)
    assert data.required_keywords["classes"] == 150
    assert sum(len(batch.labels) for batch in data.valid) == 3000
