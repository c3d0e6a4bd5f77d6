"""The drills themselves: every command is drilled, and each kind of fault is recognized as what it is."""

import csv
import faulthandler
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import yaml
from PIL import Image, ImageOps

DRILLS = Path(__file__).parents[1] / "benchmarks/drills.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="drills look into /proc")

if sys.platform == "linux":
    sys.path.insert(0, str(DRILLS.parent))
    import drills
    from fault_injection import forked_commands, media, outcomes, planted_code, servers, tables, verbs
    from fault_injection.forked_commands import CommandResult, RunningCommand, Surroundings
    from fault_injection.scenarios import Scenario
    from fault_injection.workshop import Workshop, results_of

FakeCommand = Callable[[tuple[str, ...]], int]
"""What stands in the place of the command line: it gets the arguments and returns the exit code."""
Replace = Callable[[FakeCommand], None]

SEED = 3
TIMEOUT = 2.0


def drill(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of the drills and their trials."""
    command = [sys.executable, str(DRILLS), "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


@pytest.fixture
def workshop(tmp_path: Path) -> "Workshop":
    workshop = Workshop(tmp_path, SEED, TIMEOUT)
    workshop.here.mkdir()
    return workshop


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Puts a function in the place of the command line that the forked commands carry out."""

    def replace(command: FakeCommand) -> None:
        monkeypatch.setattr("manyformer.cli.run", command)

    return replace


@pytest.fixture
def bare_workshop(workshop: "Workshop", monkeypatch: pytest.MonkeyPatch) -> "Workshop":
    """A workshop whose scenarios are empty folders, which cost no training."""

    def set_up(workshop: "Workshop", scenario: "Scenario", *, finished: bool) -> None:
        workshop.clear()
        workshop.here.mkdir()

    monkeypatch.setattr(Workshop, "set_up", set_up)
    return workshop


def test_every_command_is_drilled() -> None:
    assert {use.verb for use in verbs.USES} == verbs.verbs_of_manyformer()


def test_a_few_trials_are_of_all_families() -> None:
    plan = drills.planned(24, None, None)
    assert len(plan) == 24
    assert {family for family, _ in plan} == drills.FAMILIES.keys()
    assert len(set(drills.planned(1500, None, None))) == 1500
    assert sum(part for _, part in drills.FAMILIES.values()) == 100


Fault = tuple[str, FakeCommand]


def _run_planted(arguments: tuple[str, ...]) -> int:
    exec(Path("plant.py").read_text())
    return 0


def _hang(arguments: tuple[str, ...]) -> int:
    time.sleep(60)
    return 0


def _raise(arguments: tuple[str, ...]) -> int:
    raise AttributeError("no such thing")


def _die(arguments: tuple[str, ...]) -> int:
    # that of pytest would tell its own stack
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def _call_it_a_defect(arguments: tuple[str, ...]) -> int:
    print("error: this is a defect of manyformer", file=sys.stderr)
    return 1


def _say(text: str, code: int) -> FakeCommand:
    def command(arguments: tuple[str, ...]) -> int:
        print(text, file=sys.stderr)
        return code

    return command


COMMANDS: dict[str, Fault] = {
    "runs code": ("ran code", _run_planted),
    "does not end": ("hung", _hang),
    "raises": ("crashed", _raise),
    "is killed by a signal": ("crashed", _die),
    "calls itself a defect": ("crashed", _call_it_a_defect),
    "refuses without a name": ("unnamed", _say("error: it is wrong", 2)),
    "asks on standard input": ("unnamed", _say("Do you wish to run the custom code? [y/N] ", 0)),
    "prints control characters": ("unnamed", _say("\x1b[31mred of file.txt", 2)),
    "prints for ever": ("unnamed", _say("file.txt is wrong\n" * 2000, 2)),
    "has another result without a word": ("silent", _say("done", 0)),
    "has another result and says so": ("named", _say("file.txt: line 3 is left out", 0)),
    "says so without a place": ("silent", _say("file.txt is left out", 0)),
    "refuses with the name": ("named", _say("error: file.txt is damaged", 2)),
}


@pytest.mark.parametrize("deed", COMMANDS)
def test_a_command_is_recognized_as_what_it_does(deed: str, workshop: "Workshop", replaced: Replace) -> None:
    outcome, command = COMMANDS[deed]
    replaced(command)
    (workshop.here / "plant.py").write_text(workshop.planted)
    result = workshop.run(("command",))
    assert outcomes.judge(result, {"file.txt"}, same=False, place=r"line \d")[0] == outcome


def test_an_equal_result_is_harmless_and_nothing_is_worse_than_code_that_ran(workshop: "Workshop") -> None:
    result = CommandResult(("command",), 0, "", "", 0.1)
    assert outcomes.judge(result, set(), same=True) == ("harmless", "")
    ran = CommandResult(("command",), 2, "", "error: file.txt", 0.1, ran_code=True)
    assert outcomes.judge(ran, {"file.txt"}, same=True)[0] == "ran code"
    assert outcomes.worst([("crashed", "", ""), ("ran code", "", ""), ("named", "", "")])[0] == "ran code"


def test_minutes_of_a_table_are_no_result_and_its_scores_are(tmp_path: Path) -> None:
    def results(loss: str, minutes: str) -> dict[str, str]:
        rows = [
            "# Two",
            "",
            "| case | loss | minutes of training |",
            "| --- | ---: | ---: |",
            f"| a | {loss} | {minutes} |",
        ]
        (tmp_path / "table.md").write_text("\n".join(rows))
        return results_of(tmp_path)

    assert results("2.7", "0.0") == results("2.7", "0.3")
    assert results("2.7", "0.0") != results("2.8", "0.0")


def test_a_text_of_a_model_may_hold_control_characters_and_a_message_may_not() -> None:
    said = CommandResult(("generate", "llama"), 0, "a\x1fb", "", 0.1)
    assert outcomes.judge(said, set(), same=None)[0] == "harmless"
    result = CommandResult(("generate", "llama"), 0, "a", "a warning of \x1f", 0.1)
    assert outcomes.judge(result, set(), same=None)[0] == "unnamed"
    table = CommandResult(("evaluate", "run"), 0, "a\x1fb", "", 0.1)
    assert outcomes.judge(table, set(), same=None)[0] == "unnamed"


PLANTS = (
    "auto_map in llama/config.json, tokenizer: old",
    "a pickle as llama/training_args.bin",
    "modules in llama/",
    "an object of Python in run/run.yaml",
)


@pytest.mark.parametrize("deed", PLANTS)
def test_a_plant_is_seen_if_it_is_run(deed: str, workshop: "Workshop") -> None:
    sentinel = workshop.root / forked_commands.SENTINEL
    for name in ("llama", "run"):
        (workshop.here / name).mkdir()
    plant = next(plant for plant in planted_code.plants() if plant.deed == deed)
    plant.carry_out(workshop.here, workshop.planted)
    assert not sentinel.exists(), "planting runs nothing"
    if "pickle" in deed:
        pickle.loads((workshop.here / "llama/training_args.bin").read_bytes())
    elif "run.yaml" in deed:
        yaml.unsafe_load((workshop.here / "run/run.yaml").read_text())
    else:
        exec(next((workshop.here / "llama").glob("*.py")).read_text())
    assert sentinel.exists()


def _predictor(inputs: Callable[[str], list[str]]) -> FakeCommand:
    def command(arguments: tuple[str, ...]) -> int:
        for text in inputs(Path(arguments[2]).read_text(encoding="utf-8")):
            print(json.dumps({"input": text, "labels": []}))
        return 0

    return command


def _texts_by_csv(content: str) -> list[str]:
    return [row[0] for row in csv.reader(io.StringIO(content))]


@pytest.mark.parametrize(("reads_as_csv", "outcome"), [(True, "harmless"), (False, "silent")])
def test_a_table_that_is_cut_at_its_lines_is_silent(
    reads_as_csv: bool,
    outcome: str,
    bare_workshop: "Workshop",
    replaced: Replace,
) -> None:
    multiline = next(n for n, oddity in enumerate(tables.ODDITIES) if oddity.deed == "a cell of two lines")
    replaced(_predictor(_texts_by_csv if reads_as_csv else str.splitlines))
    number = next(
        n for n in range(0, 4000, 4) if n // 4 % len(tables.ODDITIES) == multiline and not _learns(bare_workshop, n)
    )
    trial = tables.carry_out(bare_workshop, number)
    assert (trial.deed, trial.outcome) == ("csv: a cell of two lines", outcome)


def _learns(workshop: "Workshop", number: int) -> bool:
    """Whether a trial trains, which its random numbers decide after those of its rows."""
    chance = workshop.chance(tables.FAMILY, number)
    oddity = tables.ODDITIES[number // 4 % len(tables.ODDITIES)]
    oddity.rows(tables.plain_rows(chance), chance)
    return chance.random() < 0.5


@pytest.mark.parametrize(("turned", "outcome"), [(True, "harmless"), (False, "silent")])
def test_a_picture_that_is_not_turned_is_silent(
    turned: bool,
    outcome: str,
    bare_workshop: "Workshop",
    replaced: Replace,
) -> None:
    def look(arguments: tuple[str, ...]) -> int:
        with Image.open(arguments[2]) as image:
            seen = ImageOps.exif_transpose(image) if turned else image
            brightness = float(np.asarray(seen.convert("L"))[0].mean()) / 255
        print(json.dumps({"input": "", "labels": [{"label": "dark", "probability": brightness}]}))
        return 0

    replaced(look)
    number = next(n for n in range(200) if n % 3 < 2 and _picture_of(n) == "orientation 6")
    trial = media.carry_out(bare_workshop, number)
    assert (trial.deed, trial.outcome) == ("picture: orientation 6", outcome)


def _picture_of(number: int) -> str:
    return sorted(media.IMAGES)[(number // 3 * 2 + number % 3) % len(media.IMAGES)]


def test_a_silent_recording_that_gets_a_label_is_silent(bare_workshop: "Workshop", replaced: Replace) -> None:
    def listen(arguments: tuple[str, ...]) -> int:
        wave = soundfile.read(arguments[2])[0]
        print(json.dumps({"input": "", "labels": [{"label": "low", "probability": float(np.abs(wave).mean())}]}))
        return 0

    replaced(listen)
    place = sorted(media.SOUNDS).index("two channels of opposite phase")
    trial = media.carry_out(bare_workshop, 3 * place + 2)
    assert (trial.deed, trial.outcome) == ("recording: two channels of opposite phase", "silent")


def _serve(status: int, *, frames: bool) -> FakeCommand:
    """A server that answers everything alike."""

    def command(arguments: tuple[str, ...]) -> int:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                if not frames:
                    self.send_header("X-Frame-Options", "DENY")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_GET

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        server.serve_forever()
        return 0

    return command


@pytest.mark.parametrize(
    ("deed", "frames", "outcome"),
    [
        ("a view", True, "harmless"),
        ("a foreign host", True, "silent"),
        ("a text longer than the model", True, "silent"),
        ("no frame of another page", True, "silent"),
        ("no frame of another page", False, "harmless"),
    ],
)
def test_a_server_that_answers_anybody_is_silent(
    deed: str,
    frames: bool,
    outcome: str,
    bare_workshop: "Workshop",
    replaced: Replace,
) -> None:
    replaced(_serve(200, frames=frames))
    deeds = [*servers.REQUESTS, *servers.TOGETHER]
    bare_workshop.chance(servers.FAMILY).shuffle(deeds)
    trial = servers.carry_out(Workshop(bare_workshop.root, SEED, 10.0), deeds.index(deed))
    assert (trial.deed, trial.outcome) == (deed, outcome)


def test_a_server_that_does_not_begin_is_hung(bare_workshop: "Workshop", replaced: Replace) -> None:
    replaced(_hang)
    assert servers.carry_out(bare_workshop, 0).outcome == "hung"


def test_a_command_finds_what_is_put_around_it(workshop: "Workshop", replaced: Replace) -> None:
    def tell(arguments: tuple[str, ...]) -> int:
        print(sys.stdin.read(), os.environ.get("HOME"), os.environ.get("COLUMNS"), oct(os.umask(0)))
        return 0

    replaced(tell)
    surroundings = Surroundings(input=b"yes", environment={"HOME": None, "COLUMNS": "1"}, umask=0o077)
    result = RunningCommand(("command",), workshop.here, surroundings).wait(TIMEOUT)
    assert result.output.split() == ["yes", "None", "1", "0o77"]


def test_a_command_that_is_killed_in_its_first_instant_has_said_nothing(
    workshop: "Workshop", replaced: Replace
) -> None:
    replaced(_hang)
    running = RunningCommand(("command",), workshop.here)
    os.kill(running.pid, signal.SIGKILL)
    result = running.wait(TIMEOUT)
    assert (result.code, result.output, result.errors) == (-signal.SIGKILL, "", "")


@pytest.mark.slow
def test_a_trial_is_the_same_each_time() -> None:
    for family in ("mutations", "planted-code", "tables"):
        command = ("--seed", "5", "--only", family, "--trial", "3")
        (first,), (second,) = (drill(*command)[1] for _ in range(2))
        for trial in (first, second):
            del trial["seconds"]
        assert first == second


@pytest.mark.slow
def test_a_few_faults_are_named_or_harmless() -> None:
    code, trials = drill("--trials", "11", "--seed", "0", "--jobs", "2")
    assert {trial["family"] for trial in trials} == drills.FAMILIES.keys()
    faults = [trial for trial in trials if trial.get("outcome") not in ("harmless", "named", None)]
    assert not faults
    assert code == 0
