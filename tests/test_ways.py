"""The ways of a batch and of a prompt on the page of the architecture are those that the functions are entered in."""

import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import pytest

import manyformer as mf

PACKAGE = Path(mf.__file__).parent
PAGE = Path(__file__).parents[1] / "docs/architecture.md"
SETTINGS = ("data.path=book.txt", "data.length=64", "batch.tokens=256", "dim=32", "depth=1", "heads=2")


Place = tuple[str, str]
"""A file of the package and a function in it."""


def documented_way(heading: str) -> list[tuple[int, Place]]:
    """The files and functions of a drawn chain, each with how far to the right it stands."""
    drawn = PAGE.read_text().split(f"\n## {heading}\n")[1].split("```")[1].removeprefix("text\n")
    way = re.findall(r"^([ │├└]*)([a-z_/]+\.py) +([\w.]+)", drawn, re.MULTILINE)
    assert len(way) == len(drawn.splitlines()), "a line of the chain has no file and function"
    return [(len(indent), (file, function)) for indent, file, function in way]


def place_of(code: CodeType) -> Place:
    return code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_qualname.replace(".<locals>", "")


def functions_entered(job: Callable[[], object]) -> dict[Place, list[Place]]:
    """The functions that a job enters, in the order of the first time, each with those that were running then."""
    entered: dict[CodeType, list[CodeType]] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in entered:
            entered[frame.f_code] = [running.f_code for running, _ in traceback.walk_stack(frame.f_back)]

    earlier = sys.getprofile()
    sys.setprofile(note)
    try:
        job()
    finally:
        sys.setprofile(earlier)
    places: dict[Place, list[Place]] = {}
    for code, running in entered.items():
        places.setdefault(place_of(code), [place_of(caller) for caller in running])
    return places


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
        order = list(entered)
        assert [place for _, place in way if place not in entered] == [], heading
        assert [place for _, place in sorted(way, key=lambda step: order.index(step[1]))] == [step[1] for step in way]
        callers: list[tuple[int, Place]] = []
        for indent, place in way:
            callers = [(further, caller) for further, caller in callers if further < indent]
            assert not callers or callers[-1][1] in entered[place], f"{callers[-1][1]} does not call {place}"
            callers.append((indent, place))
