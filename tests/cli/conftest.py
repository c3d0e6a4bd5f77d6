"""Fixtures of the command line's tests: one way to run a command, and tiny runs that are trained once."""

from pathlib import Path

import pytest
from commands import TEXT, TINY, Cli, Ended, pairs, sentences, train

from manyformer.cli import run


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs one command line in this process."""

    def call(*words: str) -> Ended:
        capsys.readouterr()
        code = run(words)
        return Ended(code, *capsys.readouterr())

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a text in it, where the test stands."""
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character language model, hardly trained."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(TEXT)
    return train(folder, "transformer-lm", "data.path=text.txt", "data.tokenizer=char", "data.length=64", *TINY)


@pytest.fixture(scope="session")
def pairs_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translation model, hardly trained."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "pairs.tsv").write_text("".join(f"{x}\t{y}\n" for x, y in pairs(400)))
    return train(folder, "transformer", "data.path=pairs.tsv", "data.tokenizer=char", *TINY)


@pytest.fixture(scope="session")
def labels_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, hardly trained."""
    folder = tmp_path_factory.mktemp("labels")
    rows = [(x, "early" if x < "n" else "late") for x, _ in pairs(300)]
    (folder / "labels.tsv").write_text("".join(f"{x}\t{y}\n" for x, y in rows))
    return train(folder, "transformer-classifier", "data.path=labels.tsv", "data.tokenizer=char", *TINY)


@pytest.fixture(scope="session")
def trees_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tagger, hardly trained."""
    folder = tmp_path_factory.mktemp("trees")
    (folder / "trees.conllu").write_text(sentences(200))
    return train(folder, "structural", "data.path=trees.conllu", "data.valid=0.2", *TINY)
