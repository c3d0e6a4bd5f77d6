"""What this library writes as JSON can be read by every reader of JSON, also where a number is not finite."""

import ast
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import manyformer
from manyformer.base.files.json_records import DamagedFile, FileRecord, JsonLines
from manyformer.base.files.json_text import json_text

ROOT = Path(manyformer.__file__).parent

IN_MEMORY = {
    "base/files/json_text.py",
    "base/files/json_records.py",
    "base/keyword_checks.py",
    "data/text/table_files.py",
}
"""The writer itself, the sum of a record (of constants that version 0.2.0 wrote), a value in a message, and values of
keywords for the parser that checks their types, which refuses numbers that are not finite."""


def strict(text: str) -> Any:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


class Point(NamedTuple):
    score: float
    name: str


class Scores(FileRecord):
    """A record with numbers in every place."""

    title = "scores"
    loss: float
    others: dict[str, float | None]
    points: tuple[Point, ...]
    mixed: list[int | float]
    text: str


NUMBERS = Scores(
    loss=math.nan,
    others={"perplexity": math.inf, "Infinity": -math.inf, "none": None},
    points=(Point(-math.inf, "NaN"), Point(0.5, "b")),
    mixed=[1, math.inf],
    text="NaN",
)


def test_a_record_with_numbers_that_are_not_finite_is_json_and_comes_back(tmp_path: Path) -> None:
    NUMBERS.write(tmp_path / "scores.json")
    content = strict((tmp_path / "scores.json").read_text())
    assert content["loss"] == "NaN"
    assert content["others"] == {"perplexity": "Infinity", "Infinity": "-Infinity", "none": None}
    # text that is spelled like a number stays text
    assert repr(Scores.read(tmp_path / "scores.json")) == repr(NUMBERS)


def test_a_record_that_version_0_2_0_wrote_with_constants_is_read(tmp_path: Path) -> None:
    # the sum is that which version 0.2.0 wrote for this content
    content = {"format": 1, "loss": math.nan, "others": {"a": math.inf}, "points": [], "mixed": [], "text": ""}
    (tmp_path / "old.json").write_text(json.dumps(content))
    record = Scores.read(tmp_path / "old.json")
    assert math.isnan(record.loss)
    assert record.others == {"a": math.inf}


def test_other_words_in_the_place_of_a_number_are_refused(tmp_path: Path) -> None:
    content = {"format": 1, "loss": "nan", "others": {}, "points": [], "mixed": [], "text": ""}
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(DamagedFile, match="loss: input should be a valid number, got 'nan'"):
        Scores.read(tmp_path / "bad.json")


@dataclass(frozen=True)
class Line:
    key: str
    scores: tuple[dict[str, float | None], ...]


def test_a_line_with_numbers_that_are_not_finite_is_json_and_comes_back(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "lines.jsonl", Line, "a line")
    lines.add(Line("a", ({"loss": math.nan, "accuracy": None},)))
    with (tmp_path / "lines.jsonl").open("a") as file:
        file.write('{"key": "b", "scores": [{"loss": NaN}]}\n')  # as version 0.2.0 wrote it
    assert strict((tmp_path / "lines.jsonl").read_text().splitlines()[0])["scores"][0]["loss"] == "NaN"
    entries = JsonLines(tmp_path / "lines.jsonl", Line, "a line").entries
    for key in "ab":
        loss = entries[key].scores[0]["loss"]
        assert loss is not None
        assert math.isnan(loss)


def test_numbers_that_are_not_finite_are_null_in_what_is_shown() -> None:
    value = {"a": [1.5, math.nan, (math.inf, "NaN")], math.inf: -math.inf}
    assert strict(json_text(value)) == {"a": [1.5, None, [None, "NaN"]], "Infinity": None}
    assert json_text({"b": 1, "a": "é"}, sort_keys=True, ensure_ascii=True) == '{"a": "\\u00e9", "b": 1}'


def test_json_is_written_in_one_place() -> None:
    """`json.dump` and `json.dumps` write the literals NaN and Infinity unless they are told not to."""
    callers = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if "dump" in (source := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr in ("dump", "dumps")
        and isinstance(node.value, ast.Name)
        and node.value.id == "json"
    }
    # settings as text for their own parser, whose numbers are finite
    assert {name for name in callers if not name.startswith("config/")} <= IN_MEMORY


def test_other_objects_are_their_text_beside_numbers_that_are_not_finite() -> None:
    text = json_text({"out": Path("runs/a"), "scores": (math.nan, 1)}, default=str)
    assert strict(text) == {"out": "runs/a", "scores": [None, 1]}
