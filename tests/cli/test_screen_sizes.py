"""Commands fit a terminal of 80 columns and 50 lines, and give a pipe whole rows."""

import re
import sys
from pathlib import Path

import pytest
from commands import Cli

COLUMNS = 80
LINES = 50

COMMANDS = [
    "runs",
    "compare",
    "baselines",
    "baselines mqar --examples 100",
    "plan transformer-lm",
    "evaluate run --split valid",
    "heads run --sentences 5",
    "convert run kernel=favor --out favor",
    "prune run --keep 1 --out one-head",
    "compare mine.yaml --dry-run",
    "doctor",
    "advise --length 2000 --minutes 30",
    "advise --task translation --length 60 --parameters 20M --device h100",
    "choose --task masked-lm --length 500",
    "choose --task image-classification",
]

COMPARISON = """title: Windows and their absence in a language model of characters, with everything else the same
seeds: 3
score: [loss]
run: {recipe: transformer-lm, model: {dim: 8, heads: 2}, data: {path: text.txt, length: 16}, batch: {tokens: 64}}
cases:
  all of the text: {}
  a window of sixteen tokens: {model: {window: 16, dropout: 0.1, depth: 3}, optim: {lr: 0.01, weight_decay: 0.2}}
"""


@pytest.fixture
def there(here: Path, text_run: Path) -> Path:
    (here / "run").symlink_to(text_run)
    (here / "mine.yaml").write_text(COMPARISON)
    return here


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_fits_a_screen(command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(LINES))
    # the fixture of the test replaces the streams before the command reads them
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    ended = cli(*command.split())
    assert ended.code == 0, ended.err
    # a command to paste is one line, however long
    rows = [row for row in re.sub(r"\x1b\[[0-9;]*m", "", ended.out).splitlines() if not row.startswith("manyformer ")]
    assert len(rows) <= LINES
    assert max(map(len, rows)) <= COLUMNS


@pytest.mark.parametrize("command", ["runs", "runs --all", "compare", "compare --all", "baselines"])
def test_a_pipe_gets_a_row_for_each_record(command: str, cli: Cli) -> None:
    rows = cli(*command.split()).out.splitlines()
    table = rows[2:]
    if "" in table:
        # advice follows an empty line
        table = table[: table.index("")]
    # every row begins with its name and says something about it
    assert all(re.match(r"[a-z][\w/-]*   +\S", row) for row in table), table
    assert len(table) > 15


def test_all_says_more_than_a_screen(cli: Cli) -> None:
    short = cli("compare").out
    whole = cli("compare", "--all").out
    assert len(whole) > 3 * len(short)
    assert "Give the text: `data.path=input.txt`" in whole
    assert "Give the text: `data.path=input.txt`" not in short
