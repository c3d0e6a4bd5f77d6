"""Command lines in this process, with what they write, freed of what differs from run to run."""

import io
import os
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from manyformer.cli import run

WIDTH = "100"
"""Columns of the terminal that help and tables are made for."""


class Ended(NamedTuple):
    """How a command ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str


class TextStream(io.TextIOWrapper):
    """A standard stream in memory, with the bytes below it that some commands write."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        """No terminal."""
        return False

    def text(self) -> str:
        """What was written."""
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode("utf-8", "replace")


def run_command(words: Sequence[str]) -> Ended:
    """Run one command line in the current folder."""
    os.environ["COLUMNS"] = WIDTH
    out = TextStream()
    err = TextStream()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = run(list(words))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Ended(code, out.text(), err.text())


TIMES = {
    "seconds",
    "cpu_seconds",
    "data_seconds",
    "data_wait",
    "tokens_per_second",
    "tokens a second",
    "minutes",
    "cpu_minutes",
}
"""The keys of measured times, which are another each time."""

# in this order: a rate has a unit of time, a size may follow a time
CHANGING = [
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+00:00|Z)?", "DATE"),
    (r"\b\d{4}-\d\d-\d\d\b", "DATE"),
    (r"\b\d\d:\d\d:\d\d\b", "CLOCK"),
    (r"[\d,.]+[kM]?(?= ?(tokens|targets|steps|values|pixels)?/(s|second|min)\b)", "RATE"),
    (r"\b[\d,]+(\.\d+)?(e-?\d+)? ?(tokens|targets|steps|values|characters) a second", "RATE a second"),
    (r"(?<![\w.])[\d,]+(\.\d+)?(e-?\d+)? ?(ms|us|ns|s|sec|seconds?|min|minutes?|h|hours?|days?)\b", "TIME"),
    (rf'("(?:{"|".join(sorted(TIMES))}|time|steps_per_second|cpu|load|hours)[a-z_]*": )[^,}}\]]+', r"\1MEASURED"),
    (
        r"\b(torch|Python|python|numpy|manyformer|safetensors|tokenizers|transformers) \d+(\.\d+)+(\+\w+)?",
        r"\1 VERSION",
    ),
    (
        r'("(?:torch|python|numpy|manyformer|safetensors|transformers|version|[a-z]+_version)": )"[^"]*"',
        r'\1"VERSION"',
    ),
    (r"\b[0-9a-f]{40,64}\b", "DIGEST"),
    (r'("[a-z_]*sum": )"[0-9a-f]{16}"', r'\1"DIGEST"'),
    # the time of a file in nanoseconds
    (r"\b1\d{18}\b", "STAMP"),
]


def without_changes(text: str, folder: Path) -> str:
    """A text without times, speeds, versions, and the folder where the commands ran."""
    for place in {str(folder.resolve()), str(folder)}:
        text = text.replace(place, "FOLDER")
    for pattern, name in CHANGING:
        text = re.sub(pattern, name, text)
    return "\n".join(line.rstrip() for line in text.splitlines())
