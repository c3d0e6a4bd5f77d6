"""Scorers, evaluators, windows and data on both command lines: what is checked, told and refused."""

import json
from pathlib import Path

import pytest

from manyformer.analysis.contracts.command import main
from manyformer.cli import run

SOURCE = '''
import math
import torch
from torch import nn

print("imported")


def score(tokens, rows=1):
    return torch.full((len(tokens) - 1,), math.log(8) + 0.1 * (rows > 2))


class Sees:
    """Sees the last token."""

    def __call__(self, tokens):
        return score(tokens) + 0.1 * (tokens[-1] % 2)


def sizes(ids):
    return torch.ones_like(ids)


def decode(ids):
    return bytes(65 + i for i in ids)


def evaluate(model, tokens):
    with torch.no_grad():
        return model(tokens[None, :-1], tokens[None, 1:])[1].item()


class Model(nn.Module):
    def __init__(self, vocab=11, leaks=False):
        super().__init__()
        self.embedding = nn.Embedding(vocab, 8)
        self.head = nn.Linear(8, vocab)
        self.leaks = leaks

    def forward(self, x):
        hidden = self.embedding(x)
        return self.head(hidden + (hidden.mean(1, keepdim=True) if self.leaks else 0))
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # a file is imported once in a process, so that each test has one of its own name
    (tmp_path / f"{tmp_path.name}.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("program", ["manyformer", "manyformer-check"])
def test_a_scorer_is_not_checked_by_its_name(folder: Path, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    def check(*words: str) -> int:
        return run(["check", *words]) if program == "manyformer" else main(words)

    name = f"{folder.name}.py:score"
    words = ["--scorer", name, "--vocab", "8", "--length", "20", "--bytes-of", f"{folder.name}.py:sizes"]
    words += ["--decode", f"{folder.name}.py:decode", "--partition", "rows=1,rows=2"]
    assert check(*words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{name} at 20 tokens\n")
    assert "6 passed, 1 not run" in shown
    # one that is not honest ends with 1, also as JSON, without what the file prints
    assert check(*words[:6], "--partition", "rows=3", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [row["contract"] for row in report["rows"] if row["verdict"] == "failed"] == ["partition"]
    assert check("--scorer", f"{folder.name}.py:Sees", "--vocab", "8", "--length", "20", "--only", "causal-stream") == 1
    assert "the whole stream is read before it is scored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--scorer {}.py:score", "give --vocab N"),
        ("--scorer {}.py --vocab 8", "names no function; give FILE.py:NAME"),
        ("--scorer {}.py:scores --vocab 8", "there is no 'scores' in {}.py; did you mean score?"),
        ("--scorer missing.py:score --vocab 8", "there is no file missing.py"),
        ("--scorer {}.py:score --evaluator {}.py:evaluate --vocab 8", "--scorer and --evaluator are two checks"),
        ("model --scorer {}.py:score --vocab 8", "'model' is for a model; a scorer is named by --scorer alone"),
        ("--scorer {}.py:score --vocab 8 --only causal", "no contract 'causal' of scorers; did you mean causal-stream"),
        (
            "--evaluator {}.py:evaluate --vocab 8 --only counts",
            "no contract 'counts' of evaluators; did you mean counted",
        ),
        ("--scorer {}.py:score --vocab 8 --partition rows", "'rows' is no KEY=VALUE"),
        ("--data test=a.txt", "--data needs train=PATH"),
        ("--data train=a.txt valid=b.txt", "'valid=b.txt' is no data; give train=PATH"),
        ("--data train=a.txt", "there is no file or folder a.txt"),
        ("{}.py:Model --partition rows=1", "--partition is for --scorer, and not for a model"),
    ],
)
def test_a_mistake_ends_without_a_sentence(
    folder: Path, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.replace("{}", folder.name).split()) == 2
    assert sentence.replace("{}", folder.name) in capsys.readouterr().err


def test_an_evaluator_is_not_checked_by_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--evaluator", f"{folder.name}.py:evaluate", "--vocab", "8"]) == 0
    assert "the mean of 999 targets is right" in capsys.readouterr().out


@pytest.mark.parametrize(("leaks", "code"), [("false", 0), ("true", 1)])
def test_windows_of_a_model_are_not_checked_by_its_name(
    folder: Path, leaks: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{folder.name}.py:Model", f"leaks={leaks}", "--window", "12", "--stride", "5"]
    assert main([*words, "--only", "causal-stream,counted"]) == code
    assert "Model by windows at 30 tokens" in capsys.readouterr().out


def test_data_are_not_checked_by_their_paths(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.jsonl").write_text('{"text": "a b c"}\n{"text": "d e"}\n', encoding="utf-8")
    (folder / "test.jsonl").write_text('{"text": "A, b c!"}\n', encoding="utf-8")
    assert main(["--data", "train=train.jsonl", "test=test.jsonl"]) == 1
    assert "test.jsonl:1 is train.jsonl:1" in capsys.readouterr().out
    assert run(["check", "--data", "train=train.jsonl", "--only", "duplicates,readable"]) == 0
    assert main(["--data", "train=train.jsonl", "test=test.jsonl", "--only", "labels"]) == 2
