"""What the pages tell new users to type works as the pages say: benchmarks/first_minutes.py with tiny trainings."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from first_minutes import USERS, Step, User, go, up_to_the_answer, words_to_read, write_nothing  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS, ids=lambda user: user.name)
def test_a_new_user_reaches_the_goal_by_the_commands_of_the_pages(user: User) -> None:
    pytest.importorskip("transformers")
    done = go(user, ROOT, fast=True)
    assert done["reached"], [step for step in done["steps"] if step["faults"]]


def test_every_command_of_the_users_stands_on_the_page_that_it_names() -> None:
    for user in USERS:
        for step in user.steps:
            assert step.command in (ROOT / step.page).read_text(encoding="utf-8"), step


def test_a_command_that_does_not_speak_as_its_page_says_is_a_fault() -> None:
    steps = (
        Step("manyformer --version", "README.md", ("version 9",)),
        Step("manyformer list --zzz", "README.md", ("there is no option --zzz",)),
    )
    done = go(User("nobody", "nothing", 1, write_nothing, steps), ROOT)
    assert not done["reached"]
    assert [step["faults"] for step in done["steps"]] == [
        ["it does not say 'version 9'", "README.md has another command"],
        ["exit code 2, not 0", "README.md has another command"],
    ]


def test_reading_ends_at_the_line_that_answers() -> None:
    lines = ["one two", "three failed here", "four five six"]
    assert up_to_the_answer(lines, ("causal", "failed")) == lines[:2]
    assert up_to_the_answer(lines, ("else",)) == lines
    assert up_to_the_answer(lines, ()) == lines


def test_lines_of_progress_and_repeated_ones_are_read_once() -> None:
    read: set[str] = set()
    assert words_to_read(["# data     2 labels", "step 10 loss 0.72 left 1:18"], read) == 10
    assert words_to_read(["data     2 labels", "step 20 loss 3.1e-05 left 0:08", "done"], read) == 1


def test_the_recorded_users_have_reached_their_goals_in_the_minutes_that_the_page_shows() -> None:
    record = json.loads((ROOT / "docs" / "first_minutes.json").read_text(encoding="utf-8"))
    assert [user["user"] for user in record["now"]["users"]] == [user.name for user in USERS]
    for user, recorded in zip(USERS, record["now"]["users"], strict=True):
        assert recorded["reached"]
        assert recorded["own_minutes"] <= user.minutes == recorded["most_own_minutes"]
        assert {step.command for step in user.steps} <= {step["command"] for step in recorded["steps"]}
