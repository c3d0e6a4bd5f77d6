"""Two real processes learn what one learns; what two have saved one goes on with, and the other way round."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import RunConfig, dump_run
from manyformer.training import (
    TrainingEvent,
    TrainingFinished,
    TrainingInterrupted,
    TrainingProgress,
    TrainingStarted,
    TrainResult,
    silent,
)
from manyformer.training.events import TrainingNote
from manyformer.training.process_group import ProcessFailed
from manyformer.training.run_folder import locked_folder


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("to be or not to be that is the question whether tis nobler in the mind " * 100)
    return path


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """What one process learns without interruption."""
    return mf.train(a_run(text, tmp_path_factory.mktemp("alone") / "run"), on_event=silent)


def a_run(text: Path, out: Path, **given: Any) -> RunConfig:
    """Without dropout, which differs between processes; rows of a batch do not divide evenly."""
    usual = {
        "recipe": "transformer-lm",
        "model": {"dim": 18, "depth": 2, "heads": 2},
        "data": {"kind": "text", "path": str(text), "tokenizer": "char", "length": 16},
        "batch": {"tokens": 112, "accumulate": 2},
        "limits": {"steps": 12},
        "evaluate": {"every": 5},
        "save": {"every": 4},
        "log": {"every": 1},
        "device": "cpu",
        "out": str(out),
    }
    return RunConfig.model_validate(usual | given)


AHEAD = {"tokens": 112, "accumulate": 2, "ahead": 2}
"""The batches of a process that a thread reads before their turn, of which the process alone reads none."""


def same(out: Path, alone: TrainResult) -> None:
    """The same numbers within what the order of sums changes."""
    rows, wanted = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (out, alone.out)
    )
    assert [row["step"] for row in rows] == [row["step"] for row in wanted]
    for name in ("loss", "valid_loss", "gradient_norm", "learning_rate", "tokens", "valid_accuracy"):
        expected = [row[name] for row in wanted if name in row]
        assert [row[name] for row in rows if name in row] == pytest.approx(expected, rel=1e-4)


def asking(step: int, heard: list[TrainingEvent]) -> Callable[[TrainingEvent], None]:
    """A listener that presses Ctrl-C after a step."""

    def listen(event: TrainingEvent) -> None:
        heard.append(event)
        if isinstance(event, TrainingProgress) and event.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return listen


@pytest.mark.slow
def test_one_then_two_with_shares_then_one(text: Path, alone: TrainResult, tmp_path: Path) -> None:
    out = tmp_path / "run"
    heard: list[TrainingEvent] = []
    with pytest.raises(TrainingInterrupted):
        mf.train(a_run(text, out), on_event=asking(3, []))
    with pytest.raises(TrainingInterrupted, match=r"stopped at step \d+, saved. The same command continues."):
        mf.train(a_run(text, out, devices=2, strategy="fsdp", save={"every": 1}), on_event=asking(6, heard))
    notes = [event.text for event in heard if isinstance(event, TrainingNote)]
    message = "the checkpoint was written by 1 process, and this run has 2 processes: each computes 1/2 of the rows"
    assert any(note.startswith(message) for note in notes)
    assert isinstance(heard[0], TrainingStarted)
    assert "2 processes (fsdp)" in dict(heard[0].summary_lines)["device"]
    last = sorted((out / "checkpoints").iterdir())[-1]
    assert len(list(last.glob("shard-*.safetensors"))) == 2
    assert not list(last.glob("*.metadata"))
    result = mf.train(a_run(text, out), on_event=silent)
    same(out, alone)
    assert result.load().spec == alone.load().spec


@pytest.mark.slow
def test_two_with_copies_go_on_from_one_to_the_end(text: Path, alone: TrainResult, tmp_path: Path) -> None:
    out = tmp_path / "run"
    heard: list[TrainingEvent] = []
    with pytest.raises(TrainingInterrupted):
        mf.train(a_run(text, out), on_event=asking(6, []))
    result = mf.train(a_run(text, out, devices=2, batch=AHEAD), on_event=heard.append)
    same(out, alone)
    assert isinstance(heard[-1], TrainingFinished)
    assert result.scores == pytest.approx(alone.scores, rel=1e-4)
    assert not list(out.rglob("*.part"))


def test_two_with_shares_to_the_end(text: Path, tmp_path: Path) -> None:
    """Shares of weights that layers have in common, too: T5's table of biases belongs to all of them."""
    model = {"dim": 16, "depth": 2, "heads": 2, "position": "t5"}
    common: dict[str, Any] = {"recipe": "compose", "model": model}
    common["save"] = {"every": 4, "keep_last": 2, "average_last": 2}
    alone = mf.train(a_run(text, tmp_path / "one", **common), on_event=silent)
    result = mf.train(a_run(text, tmp_path / "two", devices=2, strategy="fsdp", batch=AHEAD, **common), on_event=silent)
    same(tmp_path / "two", alone)
    assert result.scores == pytest.approx(alone.scores, rel=1e-4)
    assert sum(weight.numel() for weight in result.load().parameters()) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "context"])
def test_muon_of_two_processes_learns_what_that_of_one_does(text: Path, tmp_path: Path, strategy: str) -> None:
    """With weights whose rows two processes cannot divide evenly, saved, and gone on with by one process."""
    common: dict[str, Any] = {
        "model": {"dim": 18, "depth": 2, "heads": 2, "ff_dim": 33},
        "data": {"kind": "text", "path": str(text), "tokenizer": "char", "length": 16, "packing": "concat"},
        "optim": {"name": "muon", "normuon": 0.95},
    }
    alone = mf.train(a_run(text, tmp_path / "one", **common), on_event=silent)
    two: dict[str, Any] = {"devices": 2, "strategy": strategy}
    with pytest.raises(TrainingInterrupted):
        mf.train(a_run(text, tmp_path / "two", **two, **common), on_event=asking(6, []))
    result = mf.train(a_run(text, tmp_path / "two", **common), on_event=silent)
    same(tmp_path / "two", alone)
    assert result.scores == pytest.approx(alone.scores, rel=1e-5)


def test_two_with_shares_of_a_moving_average(text: Path, tmp_path: Path) -> None:
    """Interrupted and continued too, from shards: scores and the final model are those of one process."""
    common: dict[str, Any] = {"ema": {"beta": 0.5, "warmup": False}}
    alone = mf.train(a_run(text, tmp_path / "one", **common), on_event=silent)
    run = a_run(text, tmp_path / "two", devices=2, strategy="fsdp", **common)
    with pytest.raises(TrainingInterrupted):
        mf.train(run, on_event=asking(6, []))
    result = mf.train(run, on_event=silent)
    same(tmp_path / "two", alone)
    assert result.scores == pytest.approx(alone.scores, rel=1e-4)
    assert "moving averages" in result.chosen_weights


def test_a_mistake_is_told_once_and_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        mf.train(a_run(tmp_path / "nowhere.txt", tmp_path / "run", devices=2), on_event=silent)
    assert "Traceback" not in capfd.readouterr().err


def worker_pids(launcher: int) -> dict[int, int]:
    """The process ids of the workers that a process has launched, by rank."""
    actual = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if rank := [value for value in variables if value.startswith(b"RANK=")]:
            actual[int(rank[0].removeprefix(b"RANK="))] = int(child)
    return actual


def signalling(number: signal.Signals) -> Callable[[TrainingEvent], None]:
    """A listener that sends a signal to process 1 after step 3."""

    def listen(event: TrainingEvent) -> None:
        if isinstance(event, TrainingProgress) and event.step == 3:
            os.kill(worker_pids(os.getpid())[1], number)

    return listen


def is_trained(out: Path) -> bool:
    """Whether a process holds the lock of a run folder."""
    try:
        with locked_folder(out):
            return False
    except UserError:
        return True


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or remains only as an entry that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@linux_only
@pytest.mark.slow
def test_a_killed_process_is_named_in_one_sentence(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProcessFailed) as failed:
        mf.train(a_run(text, tmp_path / "run", devices=2, batch=AHEAD), on_event=signalling(signal.SIGKILL))
    assert str(failed.value) == (
        "process 1 of 2 was ended by SIGKILL (as the system does where memory runs out). The same command continues; "
        f"what the processes printed is in {tmp_path / 'run/processes.log'}"
    )
    assert capfd.readouterr().err == ""
    assert not worker_pids(os.getpid())


@linux_only
@pytest.mark.slow
def test_a_hung_process_is_named(text: Path, tmp_path: Path) -> None:
    run = a_run(text, tmp_path / "run", devices=2, process_timeout=0.2)
    with pytest.raises(ProcessFailed, match=r"process 1 of 2 has not answered for 0.2 minutes \(process_timeout\)"):
        mf.train(run, on_event=signalling(signal.SIGSTOP))
    assert not worker_pids(os.getpid())


@pytest.mark.slow
@linux_only
def test_workers_end_with_the_process_that_launched_them(text: Path, alone: TrainResult, tmp_path: Path) -> None:
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    run = a_run(text, out, devices=2, limits={"steps": 100000}, evaluate={"every": None}, save={"every": 1})
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(run))
    command = [sys.executable, "-c", f"import manyformer as mf; mf.train({str(file)!r})"]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(scratch)})
    begun = time.monotonic()
    while len(list(out.glob("checkpoints/step-*"))) < 2:
        assert launcher.poll() is None
        assert time.monotonic() - begun < 200
        time.sleep(0.05)
    pids = worker_pids(launcher.pid)
    assert sorted(pids) == [0, 1]
    launcher.kill()
    launcher.wait()
    begun = time.monotonic()
    while is_trained(out) or not all(map(has_ended, pids.values())):
        assert time.monotonic() - begun < 20
        time.sleep(0.05)
    assert not [path for path in scratch.iterdir() if "manyformer" in path.name]
    notes: list[str] = []
    step = max(int(path.name.split("-")[1]) for path in out.glob("checkpoints/step-*"))
    mf.train(
        a_run(text, out, limits={"steps": step + 1}, evaluate={"every": None}),
        on_event=lambda event: notes.append(getattr(event, "text", "")),
    )
    assert f"resuming from step {step}" in notes


@pytest.mark.slow
def test_a_defect_reaches_the_caller_once(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A module that the run imports fails in process 1 alone, between two steps."""
    module = tmp_path / "failing_module.py"
    module.write_text(
        "import os\n"
        "from manyformer.training import training_loop\n\n"
        "measured = training_loop.run_progress\n\n"
        "def run_progress(run, train_state):\n"
        "    progress = measured(run, train_state)\n"
        "    if os.environ.get('RANK') == '1' and progress > 0.5:\n"
        "        raise KeyError('lost')\n"
        "    return progress\n\n"
        "if 'RANK' in os.environ:\n"
        "    training_loop.run_progress = run_progress\n"
    )
    run = a_run(text, tmp_path / "run", devices=2, **{"import": [str(module)]})
    with pytest.raises(RuntimeError, match=r"^process 1 of 2: KeyError: 'lost'$") as failed:
        mf.train(run, on_event=silent)
    assert "raise KeyError('lost')" in str(failed.value.__cause__)
    assert capfd.readouterr().err == ""
    assert (tmp_path / "run/processes.log").read_text().count("raise KeyError('lost')") == 1


def test_several_processes_need_a_strategy(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyformer.training.build_model import choose_strategy
    from manyformer.training.process_group import ProcessGroup

    with pytest.raises(UserError, match="2 processes were started, but strategy is none"):
        choose_strategy("none", ProcessGroup(0, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "recipe"), [("ddp", "transformer-xl"), ("fsdp", "transformer-xl"), ("ddp", "memorizing-transformer")]
)
def test_each_process_remembers_its_own_rows(strategy: str, recipe: str, text: Path, tmp_path: Path) -> None:
    """Interrupted as well: the memory of each process is kept apart."""
    model: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "memory_length": 24, "dropout": 0.0}
    if recipe == "memorizing-transformer":
        model |= {"knn_memory_size": 64, "neighbours": 4, "block": 16}
    data = {"kind": "text", "path": str(text), "tokenizer": "char", "length": 16, "packing": "contiguous"}
    lanes: dict[str, Any] = {"recipe": recipe, "model": model, "data": data}
    one = mf.train(a_run(text, tmp_path / "one", **lanes), on_event=silent)
    two = a_run(text, tmp_path / "two", **lanes, devices=2, strategy=strategy)
    with pytest.raises(TrainingInterrupted):
        mf.train(two, on_event=asking(6, []))
    newest = max((tmp_path / "two/checkpoints").iterdir())
    assert len(list(newest.glob("memory-?-of-2.safetensors"))) == 2
    mf.train(two, on_event=silent)
    same(tmp_path / "two", one)
