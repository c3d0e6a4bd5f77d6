"""Both command lines check the same models with the same options, outputs and exit codes."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manyformer.analysis.contracts.check_report import CheckLengths, CheckReport, ContractRow
from manyformer.analysis.contracts.command import exit_code, group_words, main, read_values, wrapped_report
from manyformer.base.errors import UserError
from manyformer.cli import run

Program = Callable[..., int]

PROGRAMS: dict[str, Program] = {
    "manyformer check": lambda *words: run(["check", *words]),
    "manyformer-check": lambda *words: main(words),
}

MODEL = """
import torch
from torch import nn

print("a line of the file")


class Sound(nn.Module):
    def __init__(self, vocab_size=31):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.head = nn.Linear(16, vocab_size)

    def mix(self, x):
        return x

    def forward(self, x):
        return self.head(self.mix(self.embed(x)))


class Leaky(Sound):
    def mix(self, x):
        return x + x.mean(dim=1, keepdim=True)


def encoder():
    return Leaky(), {"causal": False}


class Flavored(Sound):
    def __init__(self, vocab_size, flavor):
        super().__init__(vocab_size)
"""

SCORER = """
import torch


def fair(tokens):
    return torch.full((len(tokens) - 1,), 97.0).log()


def peeking(tokens):
    return fair(tokens) + tokens.float().mean()
"""


@pytest.fixture(params=PROGRAMS.values(), ids=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    chosen: Program = request.param
    return chosen


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "strange.py").write_text(MODEL)
    (tmp_path / "scoring.py").write_text(SCORER)
    (tmp_path / "train.txt").write_text("one two three four five six seven eight nine\nten of them\n")
    (tmp_path / "test.txt").write_text("one two three four five six seven eight nine\n")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


CODES = {
    "an honest model": (("strange.py:Sound", "--only", "causal,repeatable"), 0, "2 passed"),
    "a leak": (("strange.py:Leaky", "--only", "causal"), 1, "the future leaks"),
    "a leak that is meant": (("strange.py:Leaky", "--not-causal", "--only", "causal,repeatable"), 0, "1 not promised"),
    "nothing could be tried": (("strange.py:encoder", "--only", "causal"), 2, "causal=False was given"),
    "a value": (("strange.py:Flavored", "flavor=sweet", "--only", "repeatable"), 0, "1 passed"),
    "options between values": (
        ("strange.py:Flavored", "--only", "repeatable", "flavor=1", "vocab_size=9"),
        0,
        "vocabulary 9",
    ),
    "a given vocabulary": (("strange.py:Sound", "--vocab", "20", "--only", "repeatable"), 0, "vocabulary 20: as given"),
    "an honest scorer": (("--scorer", "scoring.py:fair", "--vocab", "97", "--only", "causal-stream"), 0, "2 passed"),
    "a scorer that peeks": (
        ("--scorer", "scoring.py:peeking", "--vocab", "97", "--only", "causal-stream"),
        1,
        "1 failed",
    ),
    "windows": (("strange.py:Sound", "--window", "8", "--stride", "4", "--only", "counted"), 0, "by windows at"),
    "data in both sets": (
        ("--data", "train=train.txt", "test=test.txt", "--only", "overlap"),
        1,
        "stand in the training",
    ),
    "honest data": (("--data", "train=train.txt", "--only", "duplicates"), 0, "1 passed"),
}


@pytest.mark.parametrize(("words", "code", "line"), CODES.values(), ids=CODES)
def test_the_exit_code_says_what_was_found(
    program: Program, words: tuple[str, ...], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(*words) == code
    printed = capsys.readouterr()
    assert line in printed.out
    assert "a line of the file" not in printed.out


MISTAKES = {
    "a name that is not there": (
        ("strange.py:Soundd",),
        "error: there is no 'Soundd' in strange.py; did you mean Sound?",
    ),
    "values that are missing": (
        ("strange.py:Flavored",),
        "error: Flavored needs flavor, which cannot be filled by name; give it, as in `flavor=VALUE`, or name a "
        "function that builds it:\n    from strange import Flavored\n    def tiny():\n"
        "        return Flavored(vocab_size=97, flavor=...)\n",
    ),
    "an unknown contract": (
        ("strange.py:Sound", "--only", "causl"),
        "there is no contract 'causl'; did you mean causal?",
    ),
    "a value before the name": (("depth=1", "strange.py:Sound"), "error: 'depth=1' comes before the name of a model"),
    "an option of something else": (
        ("strange.py:Sound", "--block", "3"),
        "error: --block is for --scorer, and not for",
    ),
    "two checks": (("--scorer", "scoring.py:fair", "--data"), "error: --data and --scorer are two checks"),
    "a scorer and a name": (
        ("strange.py:Sound", "--scorer", "scoring.py:fair", "--vocab", "9"),
        "error: 'strange.py:Sound' is for a model; a scorer is named by --scorer alone",
    ),
    "a scorer that is not there": (("--scorer", "scoring.py:fai", "--vocab", "9"), "did you mean fair?"),
    "data without a kind": (("--data", "train.txt"), "error: 'train.txt' is no data; give train=PATH"),
    "a folder that is not there": (
        ("strange.py:Sound", "--html", "none/page.html"),
        "error: --html none/page.html must be",
    ),
    "a badge of another kind": (("strange.py:Sound", "--badge", "b.txt"), "error: --badge b.txt must end with .svg or"),
}


@pytest.mark.parametrize(("words", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    program: Program, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(*words) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.out == ""
    assert "Traceback" not in printed.err


def test_json_is_one_report_or_a_list_of_them(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("strange.py:Leaky", "--only", "causal", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["subject"], report["ok"]) == ("strange.py:Leaky", False)
    assert [row["contract"] for row in report["rows"]] == ["causal"]
    assert program("strange.py:Sound", "strange.py:None_", "strange.py:Sound", "--only", "repeatable", "--json") == 2
    printed = capsys.readouterr()
    assert [report["ok"] for report in json.loads(printed.out)] == [True, True]
    assert "error: strange.py:None_: there is no 'None_' in strange.py" in printed.err


def test_of_several_models_a_fault_decides(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("strange.py:None_", "strange.py:Leaky", "strange.py:Sound", "--only", "causal") == 1
    printed = capsys.readouterr()
    assert "strange.py:Leaky: 1 failed" in printed.out
    assert "strange.py:Sound: 1 passed" in printed.out


def test_the_page_and_the_badge_are_written_and_say_how_to_repeat_the_check(
    program: Program, request: pytest.FixtureRequest
) -> None:
    assert program("strange.py:Sound", "--only", "repeatable", "--html", "page.html", "--badge", "badge.svg") == 0
    name = request.node.callspec.id
    assert f"{name} strange.py:Sound --only repeatable" in Path("page.html").read_text()
    assert "contracts: kept" in Path("badge.svg").read_text()
    assert program("strange.py:Leaky", "--only", "causal", "--badge", "badge.json") == 1
    assert json.loads(Path("badge.json").read_text())["message"] == "1 broken"


def test_what_was_assumed_names_options_of_the_command(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("strange.py:Flavored", "flavor=1", "--only", "repeatable") == 0
    printed = capsys.readouterr().out
    assert "Flavored was built with vocab_size=97, by these names; say otherwise with vocab_size=VALUE" in printed
    assert "to say otherwise: --vocab, --max-length, --not-causal, or name a function that gives an Adapter" in printed


def test_the_traceback_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    Path("raising.py").write_text("def build():\n    raise KeyError('weights')\n")
    assert main(["raising.py:build", "--debug"]) == 2
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "raising.py:2: calling build raised KeyError: 'weights'" in printed


def test_the_small_program_explains_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    # a hook that names no model by mistake must not pass
    assert main([]) == 2
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    words = " ".join(printed.split())
    for part in ("manyformer-check model.py:GPT n_layer=2", "Importing a file runs its code", "exit code 0 if all"):
        assert part in words


def row(contract: str, verdict: str, sentence: str = "because") -> ContractRow:
    return ContractRow(contract, verdict, sentence)  # type: ignore[arg-type]


def report(*rows: ContractRow) -> CheckReport:
    return CheckReport("model.py:GPT", rows, CheckLengths(64, 64), 0, ("called as f(x)",))


@pytest.mark.parametrize(
    ("verdicts", "code", "code_of_recipe"),
    [
        (("passed", "not promised", "not run"), 0, 0),
        (("passed", "failed"), 1, 1),
        (("not run", "failed"), 1, 1),
        (("not promised",), 2, 0),
        (("not run",), 2, 2),
        ((), 2, 0),
    ],
)
def test_what_was_not_tried_is_not_honest(verdicts: tuple[str, ...], code: int, code_of_recipe: int) -> None:
    actual = report(*(row(str(number), verdict) for number, verdict in enumerate(verdicts)))
    assert exit_code(actual) == code
    # a recipe says itself what it does not promise
    assert exit_code(actual, promises_itself=True) == code_of_recipe


def test_a_report_fits_a_terminal_and_names_each_reason_once() -> None:
    rows = [
        row("causal", "failed", "the future leaks: " + "tokens change outputs " * 8),
        row("cached", "not promised", "not promised: it has no cache"),
        row("beams", "not promised", "not promised: it has no cache"),
        row("batch", "passed", "\x1b[2J"),
    ]
    lines = wrapped_report(report(*rows), 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert "cached, beams: not promised: it has no cache" in lines
    assert "batch   passed   \\u001b[2J" in lines
    assert "\x1b[1;31mfailed \x1b[0m" in wrapped_report(report(*rows), 60, colored=True)


def test_values_belong_to_the_name_before_them() -> None:
    Path("a=b.py").write_text("")
    actual = group_words(["a.py", "x=1", "--depth", "2", "--width=3", "a=b.py", "--flag", "--other", "4"])
    assert [(model.name, model.values) for model in actual] == [
        ("a.py", ["x=1", "--depth", "2", "--width=3"]),
        ("a=b.py", ["--flag", "--other", "4"]),
    ]
    assert read_values(["x=1", "--n-layer", "2", "--width=3"]) == {"x": "1", "n_layer": "2", "width": "3"}
    with pytest.raises(UserError, match="--flag has no value; give --flag=VALUE"):
        read_values(["--flag"])
