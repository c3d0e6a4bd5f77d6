"""Hugging Face data sets, from local folders in their format; nothing is downloaded."""

import sys
from pathlib import Path

import pytest

from manyformer.base.errors import UserError
from manyformer.config import LabelsData, PairsData, TextData
from manyformer.data import open_data
from manyformer.data.text.pair_tables import HubDataset

datasets = pytest.importorskip("datasets", reason="the data extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def reviews(tmp_path: Path) -> str:
    """Saved with `save_to_disk`: two splits, named labels."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    parts = {
        name: datasets.Dataset.from_dict(
            {"text": [f"{name} review number {i}" for i in range(40)], "label": [i % 2 for i in range(40)]},
            features=features,
        )
        for name in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "reviews")
    return f"hf:{tmp_path / 'reviews'}"


def test_labelled_texts_and_the_names_of_labels(reviews: str, tmp_path: Path) -> None:
    config = LabelsData(path=reviews, valid=f"{reviews}#test", tokenizer="byte")
    data = open_data(config, "labelled", batch_tokens=200, cache=tmp_path / "run", seed=0)
    assert data.labels == ("bad", "good")
    assert [(one.source, one.target) for one in data.examples("valid")][:2] == [
        ("test review number 0", "bad"),
        ("test review number 1", "good"),
    ]


def test_running_text(reviews: str, tmp_path: Path) -> None:
    # Such a folder is known without the prefix too.
    config = TextData(path=reviews.removeprefix("hf:"), length=64, valid=0.2)
    data = open_data(config, "next-token", batch_tokens=256, cache=tmp_path / "run", seed=0)
    assert "40 documents" in data.describe()[0]
    text = data.target.decode(next(data.train).tokens[0].tolist())
    assert "train review number" in text


def test_pairs_in_a_translation_column_of_a_folder_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "translations"
    folder.mkdir()
    lines = (f'{{"translation": {{"en": "word {i}", "de": "Wort {i}"}}}}\n' for i in range(50))
    (folder / "train.jsonl").write_text("".join(lines))
    config = PairsData(
        path=f"hf:{folder}", source="translation.en", target="translation.de", tokenizer="byte", valid=0.2
    )
    data = open_data(config, "pairs", batch_tokens=100, cache=tmp_path / "run", seed=0)
    actual = {(one.source, one.target) for one in data.examples("valid")}
    assert actual
    assert actual <= {(f"word {i}", f"Wort {i}") for i in range(50)}


def test_what_is_wrong_is_said(reviews: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there is no split 'valid'; it has train, test"):
        HubDataset(f"{reviews}#valid")
    with pytest.raises(UserError, match="record 0: column 'txt' is missing; did you mean text"):
        list(HubDataset(reviews).rows(["txt"]))
    with pytest.raises(UserError, match=r"hf:.*nowhere: this data set cannot be loaded"):
        HubDataset(f"hf:{tmp_path / 'nowhere'}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the `datasets` library: pip install 'manyformer\[data\]'"):
        HubDataset(reviews)


def test_a_folder_has_no_configurations_and_only_its_own_splits(reviews: str) -> None:
    with pytest.raises(UserError, match="a folder has no configurations; leave out @small"):
        HubDataset(f"{reviews}@small")
    for path, splits in ((reviews, "train, test"), (f"{reviews}/train", "train")):
        with pytest.raises(UserError, match=f"there is no split 'vald'; it has {splits}$"):
            HubDataset(f"{path}#vald")


def test_a_damaged_data_set_gives_a_sentence_and_never_a_signal(reviews: str) -> None:
    """Offsets that point outside the text would be read without a check."""
    (file,) = Path(reviews.removeprefix("hf:"), "train").glob("*.arrow")
    content = file.read_bytes()
    position = content.index(b"train review number 0") - 64
    # a new file, because the old one is mapped into memory
    file.unlink()
    file.write_bytes(content[:position] + b"\xff\xff\xff\x7f" * 4 + content[position + 16 :])
    with pytest.raises(UserError, match=r"this data set cannot be loaded \(ArrowInvalid: .*[Oo]ffset"):
        list(HubDataset(reviews).rows(["text"]))
