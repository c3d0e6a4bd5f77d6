"""Signals at any moment: real processes end soon, leave no files behind, and the same command goes on."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manyformer.base.errors import TrainingInterrupted
from manyformer.base.system import (
    STOPPED,
    StoppedBySignal,
    handle_stop_signals,
    resumable,
    temporary_folder,
)

LONGEST = 20
"""Seconds after which a process counts as hung; what it takes on a quiet machine is below two."""


def started(code: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """A process that runs `code` with `folder` for temporary files."""
    folder.mkdir(exist_ok=True)
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **environment}
    return subprocess.Popen([sys.executable, "-c", code], env=settings, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    begun = time.monotonic()
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - begun < 100
        time.sleep(0.01)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and what was printed."""
    _, printed = process.communicate(timeout=LONGEST)
    return process.returncode, printed


COMMAND = """
import hashlib, sys, time
from pathlib import Path
import manyformer.cli
from manyformer.base.system import temporary_folder

def work(arguments):
    with temporary_folder() as folder:
        (folder / "ready").touch()
        {work}

manyformer.cli.run = work
try:
    manyformer.cli.main()
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("work", "code"),
    [
        ("time.sleep(1000)", 7),
        # native code that does not look for signals, without the lock of the interpreter
        ("hashlib.pbkdf2_hmac('sha256', b'a', b'b', 10**9)", STOPPED),
    ],
    ids=["python", "native"],
)
def test_a_command_ends_and_leaves_no_files(work: str, code: int, number: int, tmp_path: Path) -> None:
    process = started(COMMAND.format(work=work), tmp_path)
    wait_until(lambda: list(tmp_path.glob(".manyformer-*/ready")), process)
    process.send_signal(number)
    assert end_of(process)[0] == code
    assert not list(tmp_path.iterdir())


def test_a_second_signal_ends_a_command_that_is_still_cleaning_up(tmp_path: Path) -> None:
    work = "try: time.sleep(1000)\n        finally: (folder / 'slow').touch(); time.sleep(0.6); time.sleep(1000)"
    process = started(COMMAND.format(work=work), tmp_path)
    wait_until(lambda: list(tmp_path.glob(".manyformer-*/ready")), process)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: list(tmp_path.glob(".manyformer-*/slow")), process)
    process.send_signal(signal.SIGTERM)
    assert end_of(process)[0] == STOPPED
    assert not list(tmp_path.iterdir())


def test_folders_of_killed_processes_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = started(COMMAND.format(work="time.sleep(1000)"), tmp_path)
    wait_until(lambda: list(tmp_path.glob(".manyformer-*/ready")), process)
    with temporary_folder() as own:
        assert len(list(tmp_path.iterdir())) == 2, "the folder of a process that runs is not touched"
    process.kill()
    assert end_of(process)[0] == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with temporary_folder() as own:
        assert list(tmp_path.iterdir()) == [own]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_an_exception_or_a_flag(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with pytest.raises(StoppedBySignal), handle_stop_signals():
        os.kill(os.getpid(), number)
    with handle_stop_signals() as stop_signal, stop_signal.awaited():
        assert not stop_signal
        os.kill(os.getpid(), number)
        assert stop_signal.signal_name == signal.Signals(number).name
        with handle_stop_signals() as inner:
            assert inner is stop_signal
    assert "stopping after this step" in capfd.readouterr().err
    with pytest.raises(TrainingInterrupted, match="The same command continues"), resumable():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_only_a_second_ctrl_c_interrupts_an_awaiting_block() -> None:
    with handle_stop_signals() as stop_signal, stop_signal.awaited():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_a_signal_while_a_vocabulary_is_learnt(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number * 7919 % 1000003:x} " for number in range(120_000)))
    command = ["train", "transformer-lm", f"data.path={text}", "data.tokenizer=bpe", "data.vocab=1000"]
    command += ["data.length=32", "dim=8", "depth=1", "heads=1", "batch.tokens=64", "limits.steps=1"]
    command += ["evaluate.batches=1", f"out={tmp_path / 'run'}", "--quiet"]
    log, scratch = tmp_path / "run/log.txt", tmp_path / "scratch"
    code = f"import sys; sys.argv[1:] = {command!r}; from manyformer.cli import main; main()"
    process = started(code, scratch)
    wait_until(lambda: log.exists() and "preparing" in log.read_text(), process)
    process.send_signal(signal.SIGTERM)
    exit_code, printed = end_of(process)
    assert exit_code == STOPPED
    assert "stopped" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run/model").exists(), "the signal came too late"
    assert not list(scratch.glob(".manyformer-*"))
    process = started(code, scratch)
    _, printed = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    assert (tmp_path / "run/model").is_dir()
    assert not list((tmp_path / "run/data").glob(".*.part"))


def test_a_temporary_folder_that_another_process_takes_away_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "second").mkdir()
    folders = iter([tmp_path / "removed", tmp_path / "second"])
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **names: str(next(folders)))
    with temporary_folder() as folder:
        assert folder == tmp_path / "second"
