"""Processes that are really killed or stopped, and go on as if nothing had happened."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def play(folder: Path, *scenarios: str, most: float) -> tuple[dict[str, Any], str]:
    """What zygote.py found, and what its processes complained of."""
    script = Path(__file__).with_name("zygote.py")
    command = [sys.executable, str(script), str(folder), *scenarios]
    done = subprocess.run(command, capture_output=True, text=True, timeout=most, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    names = (
        "kills:3",
        "kills_ahead:3",
        f"interrupts:{int(signal.SIGINT)}",
        f"interrupts:{int(signal.SIGTERM)}",
        "impatient:0",
        "impatient:2",
    )
    return play(tmp_path_factory.mktemp("played"), *names, most=240)


@pytest.mark.parametrize("name", ["kills:3", "kills_ahead:3"])
def test_a_few_kills(name: str, played: tuple[dict[str, Any], str]) -> None:
    actual = played[0][name]
    assert actual["kills"] == 3
    assert actual["same"] == actual["runs"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_kills(tmp_path: Path) -> None:
    actual = play(tmp_path, "kills:100", most=1200)[0]["kills:100"]
    print(actual)
    assert actual["kills"] == 100
    assert actual["same"] == actual["runs"] >= 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves(number: int, played: tuple[dict[str, Any], str]) -> None:
    assert played[0][f"interrupts:{int(number)}"] == {
        "said": "stopped at step 6, saved. The same command continues.",
        "same": [True, True],
        "aside": ["run.old-1"],
        "busy": [2, 2],
        "stopped": 130,
        "resumed": 0,
        "fresh": 0,
    }


def test_a_busy_folder_is_refused_in_one_sentence(played: tuple[dict[str, Any], str]) -> None:
    complaints = [line for line in played[1].splitlines() if "is being trained by another process (number " in line]
    assert len(complaints) == 4


@pytest.mark.parametrize("ahead", [0, 2])
def test_asking_twice_stops_at_once(ahead: int, played: tuple[dict[str, Any], str]) -> None:
    """The run waits in a step, after which it would stop politely with 130."""
    assert played[0][f"impatient:{ahead}"] == {"code": 1}
