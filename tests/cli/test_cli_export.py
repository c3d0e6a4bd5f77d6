"""Models for other libraries from the command line."""

import json
from pathlib import Path

import pytest
from commands import Cli

import manyformer as mf
from manyformer.data.saved_tokenizers import TokenizerPair, train_tokenizer
from manyformer.models.model_files import replacement_folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A classifier with names of its labels, a tokenizer and a card, as a run leaves it."""
    model = mf.build("transformer-classifier", vocab=20, classes=2, dim=8, depth=1, heads=2)
    tokenizer = train_tokenizer("char", ["the cat sat"])
    with replacement_folder(tmp_path / "run" / "model") as draft:
        TokenizerPair(tokenizer, tokenizer, ("no", "yes")).save(draft)
        (draft / "README.md").write_text("# A run\n\n| loss | 0.25 |\n")
        model.write_files(draft)
    return tmp_path / "run"


def test_a_run_becomes_a_folder_for_transformers(cli: Cli, run: Path, tmp_path: Path) -> None:
    ended = cli("export", str(run), "--to", "hf", "--out", str(tmp_path / "out"))
    assert ended.code == 0, ended.err
    assert "AutoModelForSequenceClassification" in ended.out
    assert "because no class of transformers equals the recipe transformer-classifier" in " ".join(ended.err.split())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| loss | 0.25 |" in card
    assert "pipeline_tag: text-classification" in card
    assert mf.load(tmp_path / "out").spec == mf.load(run).spec


def test_json_and_what_has_no_tokenizer(cli: Cli, tmp_path: Path) -> None:
    mf.build("transformer-lm", vocab=20, dim=8, depth=1, heads=2).save(tmp_path / "model")
    report = json.loads(cli("export", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--json").out)
    assert (report["architecture"], report["reason"]) == ("GPT2LMHeadModel", None)
    assert report["tokenizer_reason"] == "the model was saved without a tokenizer"
    assert "Radford et al. 2019" in (tmp_path / "out" / "README.md").read_text()
    ended = cli("export", str(tmp_path / "model"), "--out", str(tmp_path / "out"))
    assert ended.code == 2
    assert "exists already" in ended.err


def test_nothing_is_written_for_other_kinds_of_models(cli: Cli, tmp_path: Path) -> None:
    mf.build("gcn", features=3, classes=2, dim=4, depth=1).save(tmp_path / "model")
    ended = cli("export", str(tmp_path / "model"), "--out", str(tmp_path / "out"))
    assert ended.code == 2
    assert "gcn is for labelling nodes of graphs; what transformers can have are" in " ".join(ended.err.split())
    assert not (tmp_path / "out").exists()
