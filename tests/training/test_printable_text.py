"""Control characters of names and texts never reach a terminal, a log or a model card."""

import io
import json
import sys
import unicodedata
from pathlib import Path

import pytest
from fakes import a_run

from manyformer.base.files.text_tables import printable, printable_line
from manyformer.cli import console
from manyformer.recipes import build, get_recipe
from manyformer.training.events import TrainingNote, TrainResult, format_event
from manyformer.training.validation import model_card

EVIL = "a\x1b[31m\x07\x9b\u202e\u2028\udcff.txt"
SAFE = "a\\u001b[31m\\u0007\\u009b\\u202e\\u2028\\udcff.txt"


def test_every_control_character_is_escaped_and_nothing_else() -> None:
    for code in range(0x110000):
        character = chr(code)
        controls = unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs") or unicodedata.bidirectional(
            character
        ) in ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")
        assert (printable_line(character) != character) == controls, hex(code)
    assert printable("a\n\tb") == "a\n\tb"
    assert printable_line("a\n\tb") == "a\\u000a\\u0009b"
    assert printable(EVIL) == SAFE


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_output_of_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    console.print_result(EVIL)
    console.print_table(console.PageTable((EVIL, "b"), [(EVIL, 1)]))
    console.print_heading(EVIL)
    console.print_json({EVIL: [EVIL]})
    console.print_note(EVIL)
    console.print_error(f"{EVIL}\nsecond")
    printed = capsys.readouterr()
    assert printed.out.count(SAFE) == 6
    assert printed.err == f"{SAFE}\nerror: {SAFE}\nerror: second\n"
    assert printable(printed.out) == printed.out
    console.print_json({EVIL: 1})
    assert json.loads(capsys.readouterr().out) == {EVIL: 1}
    # what a model has written is a result: a file gets it unchanged
    console.print_text("a\x1b")
    assert capsys.readouterr().out == "a\x1b\n"
    monkeypatch.setattr(sys, "stdout", Terminal())
    console.print_text("a\x1b")
    assert sys.stdout.getvalue() == "a\\u001b\n"  # type: ignore[attr-defined]


def test_log_and_card(tmp_path: Path) -> None:
    (line,) = format_event(TrainingNote(f"{EVIL}\nerror: made up"))
    assert line == f"note     {SAFE}\\u000aerror: made up"
    run, model = a_run(tmp_path), build("transformer-lm", vocab=5, dim=8, depth=1, heads=1)
    result = TrainResult(tmp_path, 1, "", "the last", {"loss": 1.0})
    text = model_card(run, get_recipe("transformer-lm").card, model, [f"text: {EVIL}\n# made up"], result)
    assert f"- text: {SAFE}\\u000a# made up\n" in text
    assert printable(text) == text
