"""The trainings and comparisons of the pages can be started, as dry runs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyformer.cli import run
from test_documentation import PLACEHOLDER, WRITTEN, command_lines

DRY = ("train", "compare")
"""Commands whose dry run resolves all names and settings, and builds the models."""
SEPARATE = ("--help", "downloads/", "models/", ".yaml", "classify/", "surgery/")
"""Parts of commands that need files which only their reader has, or an earlier run."""


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


@pytest.mark.parametrize("words", commands_of(*DRY), ids=" ".join)
def test_a_documented_training_can_be_started(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*words, *(["--dry-run"] * ("--dry-run" not in words and "--show" not in words))]) == 0
