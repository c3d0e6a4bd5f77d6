"""Models of other libraries from the command line."""

import json
from pathlib import Path

import pytest
from commands import Cli

import manyformer as mf
from manyformer.interop import export_model


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    export_model(mf.build("transformer-lm", vocab=40, dim=16, depth=1, heads=2, max_length=16), tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_a_folder_becomes_a_model(cli: Cli, foreign: Path, tmp_path: Path) -> None:
    ended = cli("import", str(foreign), "--out", str(tmp_path / "model"))
    assert ended.code == 0
    assert "GPT-2" in ended.out
    assert "no tokenizer.json there" in ended.err
    assert mf.load(tmp_path / "model").spec == mf.load(foreign).spec
    report = json.loads(cli("import", str(foreign), "--out", str(tmp_path / "again"), "--json").out)
    assert (report["recipe"], report["parameters"]) == ("transformer-lm", 4_208)


def test_nothing_is_written_where_it_fails(cli: Cli, foreign: Path, tmp_path: Path) -> None:
    for words, sentence in (
        ([str(tmp_path / "nowhere")], "nowhere"),
        ([str(foreign)], "model.safetensors is damaged"),
    ):
        (foreign / "model.safetensors").write_bytes(b"no weights")
        ended = cli("import", *words, "--out", str(tmp_path / "model"))
        assert ended.code == 2
        assert sentence in ended.err
        assert not (tmp_path / "model").exists()
    assert cli("import", str(foreign), "--out", str(foreign)).code == 2


def test_the_folder_itself_is_a_model(cli: Cli, foreign: Path) -> None:
    ended = cli("check", str(foreign), "--only", "causal")
    assert ended.code == 0
    assert "1 passed" in ended.out
