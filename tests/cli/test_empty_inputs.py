"""Empty files and empty names: every verb that is given one says so in one sentence, and ends with code 2."""

from pathlib import Path
from typing import Any

import pytest
from commands import Cli

EMPTY = "empty"
"""What stands for the path of an empty file, whose suffix follows it."""

VERBS = {
    "evaluate text_run --data empty.txt": "this file is empty",
    "evaluate pairs_run --data empty.tsv": "there is nothing in it",
    "evaluate pairs_run --data empty.txt --data empty.txt": "there is nothing in it",
    "evaluate labels_run --data empty.jsonl": "there is nothing in it",
    "translate pairs_run --input empty.txt": "there is no line in it",
    "predict labels_run empty.csv": "there is nothing to label in it",
    "heads text_run --trees empty.conllu": "there is no sentence",
    "calibrate text_run --data empty.txt --tolerance 0.1": "this file is empty",
    "datastore build text_run --data empty.txt --out store": "this file is empty",
    "compare empty.yaml": "is empty; a comparison has a base run and cases",
    "train empty.yaml": "is empty; a run file names at least a recipe",
    "train empty.yaml --dry-run": "is empty; a run file names at least a recipe",
    "train transformer-lm data.path=empty.txt": "this file is empty",
    "train transformer data.path=empty.tsv out=new": "there are no rows in it",
    "train vit data.path=empty.npz out=new": "this is not a complete NumPy archive",
    "advise --length 16 --results empty.json": "it is empty, and not the results of a suite",
}


@pytest.mark.parametrize("words", VERBS)
def test_an_empty_file_is_one_sentence(words: str, cli: Cli, here: Path, request: pytest.FixtureRequest) -> None:
    arguments = []
    for word in words.split():
        if word.endswith("_run"):
            word = str(request.getfixturevalue(word))
        elif EMPTY in word:
            Path(word.rpartition("=")[2]).write_bytes(b"")
        arguments.append(word)
    ended = cli(*arguments)
    (error,) = (line for line in ended.err.splitlines() if line.startswith("error: "))
    assert ended.code == 2
    assert EMPTY in error
    assert VERBS[words] in error


@pytest.mark.parametrize(
    "words",
    [
        *("attention RUN to be", "view RUN to be", "export RUN", "convert RUN --to transformer-lm", "import RUN"),
        *("plot RUN", "bench transformer-lm", "compare two.yaml", "prune RUN --how importance --keep 1", "heads RUN"),
        *("datastore build RUN", "datastore neighbours RUN store", "calibrate RUN --sweep", "regress", "play RUN"),
        *("record RUN", "show bigbird --pattern", "evaluate RUN --lengths 10", "calibrate RUN --tolerance 0.1"),
        *("generate RUN", "train transformer-lm data.path=a.txt"),
    ],
)
@pytest.mark.parametrize("option", [("--out", ""), ("--out=",)], ids=" ".join)
def test_an_empty_out_is_no_folder(words: str, option: tuple[str, ...], cli: Cli, here: Path) -> None:
    ended = cli(*words.split(), *option)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: --out is empty; give the file or folder to write, or leave it out\n"
    assert [file.name for file in here.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("words", [("generate", "", "to be"), ("predict", "", "a.txt"), ("evaluate", "")], ids=" ".join)
def test_an_empty_name_of_a_run_is_refused(words: tuple[str, ...], cli: Cli, here: Path) -> None:
    ended: Any = cli(*words)
    assert ended.code == 2
    assert ended.err.startswith("error: the name of the run is empty; ")
