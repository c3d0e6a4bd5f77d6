"""What commands return: printed as a page or as the JSON of its fields, and drawn in either case."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from commands import Cli, train

from manyformer.cli.console import Block, Heading, Note, Output, PageTable, print_output


class Cell(NamedTuple):
    length: int
    seconds: float


@dataclass
class Report:
    cells: list[Cell]
    weights: torch.Tensor
    folder: Path


REPORT = Report([Cell(8, 0.5), Cell(16, math.nan)], torch.eye(2), Path("runs/a"))


def never() -> Iterator[Block]:
    raise AssertionError("the page is made only when it is printed")
    yield ""


def test_the_json_of_a_record_has_the_fields_of_all_records_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_output(Output(REPORT, never()), as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "cells": [{"length": 8, "seconds": 0.5}, {"length": 16, "seconds": None}],
        "weights": [[1.0, 0.0], [0.0, 1.0]],
        "folder": "runs/a",
    }


def test_a_page_has_lines_and_tables_on_stdout_and_notes_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    page = ["cells", Note("beside"), Heading("Times"), PageTable(("length", "s"), [(8, "0.5"), (16, "2")], right=(1,))]
    print_output(Output(REPORT, page), as_json=False)
    out, err = capsys.readouterr()
    assert out.splitlines()[:4] == ["cells", "", "Times", "length     s"]
    assert out.splitlines()[5:] == ["8        0.5", "16         2"]
    assert err == "beside\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_the_picture_is_drawn_after_either_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    picture = tmp_path / "cells.png"
    print_output(Output(REPORT, ["cells"], picture, lambda path: path.write_text("drawn")), as_json=as_json)
    assert picture.read_text() == "drawn"
    assert capsys.readouterr().err == f"wrote {picture}\n"


def test_the_baselines_of_an_evaluation_are_records_with_names(cli: Cli, here: Path) -> None:
    train(here, "rules/copy", "limits.steps=1", "dim=8", "depth=1", "heads=1")
    evaluation = json.loads(cli("evaluate", "runs/rules-copy", "--json").out)
    assert set(evaluation["guesses"]) == {"majority", "shortcut"}
    assert evaluation["guesses"]["majority"]["name"] == "majority"
    assert 0 < evaluation["guesses"]["majority"]["accuracy"] < evaluation["guesses"]["shortcut"]["accuracy"] < 100
