"""The ways of a batch and of a prompt on the page of the architecture are those that the functions are entered in."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import pytest

import manyformer as mf

PACKAGE = Path(mf.__file__).parent
PAGE = Path(__file__).parents[1] / "docs/architecture.md"
SETTINGS = ("data.path=book.txt", "data.length=64", "batch.tokens=256", "dim=32", "depth=1", "heads=2")


def documented_way(heading: str) -> list[tuple[str, str]]:
    """The files and functions of a drawn chain."""
    drawn = PAGE.read_text().split(f"\n## {heading}\n")[1].split("```")[1]
    way = re.findall(r"^[ │├└]*([a-z_/]+\.py) +([\w.]+)", drawn, re.MULTILINE)
    assert len(way) == len(drawn.strip().splitlines()) - 1, "a line of the chain has no file and function"
    return way


def functions_entered(job: Callable[[], object]) -> list[tuple[str, str]]:
    """The functions of the package that a job enters, each once, in the order of the first time."""
    entered: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.setdefault(frame.f_code)

    earlier = sys.getprofile()
    sys.setprofile(note)
    try:
        job()
    finally:
        sys.setprofile(earlier)
    codes = [code for code in entered if code.co_filename.startswith(f"{PACKAGE}/")]
    places = [
        (code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_qualname.replace(".<locals>", "")) for code in codes
    ]
    return list(dict.fromkeys(places))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """A training of two steps in an empty folder."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("def add(a, b):\n    return a + b\n" * 400)
    settings = [*SETTINGS, "limits.steps=2", "evaluate.every=2", "out=run", "device=cpu"]
    return lambda: mf.train("transformer-lm", settings, on_event=lambda event: None)


def test_a_batch_and_a_prompt_go_the_ways_that_the_page_draws(run: Callable[[], object]) -> None:
    jobs = {"The way of a batch": run, "The way of a prompt": lambda: mf.generate(mf.load("run"), "def ", max_new=3)}
    for heading, job in jobs.items():
        way = documented_way(heading)
        entered = functions_entered(job)
        assert [place for place in way if place not in entered] == [], heading
        assert sorted(way, key=entered.index) == way, heading
