"""What people and scripts read of a check."""

import io
import json
import math

from rich.console import Console

from manyformer.analysis.contracts import CheckReport, ContractRow
from manyformer.analysis.contracts.check_report import CheckLengths

LENGTHS = CheckLengths(48, 64, 700)

ROWS = (
    ContractRow("causal", "failed", "the future leaks [sic]", 4.8e-5, 0.0),
    ContractRow("cached", "passed", "steps agree", 2e-16, 1e-9),
    ContractRow("bfloat16", "failed", "not finite", math.nan, 0.05),
    ContractRow("packing", "not promised", "not promised: no numbers"),
    ContractRow("float16", "not run", "not run: on a CPU"),
)


def test_a_report_is_good_unless_a_promise_is_broken() -> None:
    assert not CheckReport("net", ROWS, LENGTHS, 0).ok
    assert CheckReport("net", ROWS[1:2] + ROWS[3:], LENGTHS, 0).ok
    assert [row.contract for row in CheckReport("net", ROWS, LENGTHS, 0).failed] == ["causal", "bfloat16"]


def test_the_heading_states_all_lengths() -> None:
    headings = [
        CheckReport("net", (), CheckLengths(*lengths), 0).heading for lengths in ((64, 64), (48, 128), (48, 512, 2048))
    ]
    assert headings == [
        "net at 64 tokens",
        "net at 48 tokens, causality at 128",
        "net at 48 tokens, causality at 512 and a few of 2048",
    ]


def test_rows_are_found_by_contract() -> None:
    report = CheckReport("net", ROWS, LENGTHS, 0)
    assert report["cached"] is ROWS[1]
    assert "learns" not in [row.contract for row in report.rows]


def test_the_table_shows_verdict_numbers_and_sentence() -> None:
    lines = CheckReport("net", ROWS, LENGTHS, 0).table().splitlines()
    assert lines[0] == "net at 48 tokens, causality at 64 and a few of 700"
    assert lines[2].split() == ["causal", "failed", "4.8e-05", "0", "the", "future", "leaks", "[sic]"]
    assert lines[4].split()[:4] == ["bfloat16", "failed", "nan", "5.0e-02"]
    assert lines[-1] == "net: 1 passed, 2 failed, 1 not promised, 1 not run"
    assert str(CheckReport("net", ROWS, LENGTHS, 0)) == "\n".join(lines)


def test_json_is_strict() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    report = json.loads(CheckReport("net", ROWS, LENGTHS, 7).to_json(), parse_constant=refuse)
    assert (report["subject"], report["ok"], report["length"], report["seed"]) == ("net", False, 64, 7)
    assert report["lengths"] == {"steps": 48, "long": 64, "probe": 700}
    assert report["rows"][0] == {
        "contract": "causal",
        "verdict": "failed",
        "sentence": "the future leaks [sic]",
        "measured": 4.8e-5,
        "tolerance": 0.0,
        "place": None,
    }
    assert report["rows"][2]["measured"] == "nan"
    assert report["rows"][3]["measured"] is None


def test_the_terminal_shows_brackets_as_they_are() -> None:
    terminal = io.StringIO()
    Console(width=120, file=terminal).print(CheckReport("nets[2]", ROWS, LENGTHS, 0).rich())
    shown = terminal.getvalue()
    assert "leaks [sic]" in shown
    assert shown.startswith("nets[2] at 48 tokens, causality at 64")
    assert "not promised" in shown
