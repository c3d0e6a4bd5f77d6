"""The commands of the pages run: as they stand, as a dry run, or on a small run of the same name."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyformer.cli import run
from test_documentation import PLACEHOLDER, WRITTEN, command_lines

SMALL = ("model.dim=16", "model.depth=2", "model.heads=2", "limits.steps=2", "data.vocab=300", "data.length=32")
"""Settings that make a run of lm/stdlib cheap."""
DRY = ("train", "compare")
"""Commands whose dry run resolves all names and settings, and builds the models."""
AS_THEY_STAND = ("list", "show", "plan", "runs", "floors")
ON_A_RUN = ("generate", "evaluate", "plot", "view", "attention")
"""Commands that run on runs/lm-stdlib."""
SEPARATE = ("--calibrate", "--serve", "--help", "mixing", "--compare", "downloads/", "models/", "runs copy")
"""Parts of commands that measure time, wait, need files of others, or are tested elsewhere (`tests/cli`)."""


def words_of(line: str) -> list[str]:
    # two spaces begin an explanation
    return shlex.split(re.split(r"\s{2,}|\s[|>]\s", line)[0])[1:]


def documented_commands() -> Iterator[list[str]]:
    """All commands without names to fill in, each once."""
    lines = dict.fromkeys(line for page in WRITTEN for line in command_lines(page))
    for line in lines:
        words = words_of(line)
        if len(words) < 2 or PLACEHOLDER.search(line) or any(part in line for part in SEPARATE):
            continue
        yield words


COMMANDS = list(documented_commands())


def commands_of(*verbs: str) -> list[list[str]]:
    return [words for words in COMMANDS if words[0] in verbs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a text and a small run, in which the commands run."""
    path, home = tmp_path_factory.mktemp("documented"), Path.cwd()
    os.chdir(path)
    (path / "mine.yaml").write_text("extends: lm/stdlib\n")
    for name in ("book.txt", "other.txt"):
        (path / name).write_text("the cat sat on the mat. the dog sat on the log. " * 400)
    assert run(["train", "lm/stdlib", "data.path=book.txt", *SMALL, "--quiet"]) == 0
    yield path
    os.chdir(home)


@pytest.mark.parametrize("words", commands_of(*DRY), ids=" ".join)
def test_a_documented_training_can_be_started(words: list[str], folder: Path) -> None:
    assert run([*words, *(["--dry-run"] * ("--dry-run" not in words and "--show" not in words))]) == 0


@pytest.mark.parametrize("words", commands_of(*AS_THEY_STAND), ids=" ".join)
def test_a_documented_command_runs(words: list[str], folder: Path) -> None:
    assert run(words) == 0


@pytest.mark.parametrize(
    "words", [words for words in commands_of(*ON_A_RUN) if "runs/lm-stdlib" in words], ids=" ".join
)
def test_a_documented_use_of_a_run_works(words: list[str], folder: Path) -> None:
    assert run(words) == 0
