"""Launch a run in several processes through torchrun and pass their events back to the caller."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from manyformer.config import RunConfig, dump_run
from manyformer.errors import UserError
from manyformer.train.durable_files import replace_text
from manyformer.train.event_protocol import decode
from manyformer.train.events import EventListener, TrainingFinished, TrainResult
from manyformer.train.signals import StopSignal, handle_stop_signals

# How often new events are read, in seconds.
POLL_SECONDS = 0.05


def launch(run: RunConfig, *, fresh: bool, on_event: EventListener) -> TrainResult:
    """Train with `run.devices` processes on this machine and return their result."""
    with (
        tempfile.TemporaryDirectory(prefix="manyformer-") as scratch_dir,
        handle_stop_signals(patient=True) as stop_signal,
    ):
        run_file, events = Path(scratch_dir) / "run.yaml", Path(scratch_dir) / "events"
        replace_text(run_file, dump_run(run))
        events.touch()
        workers = _start_workers(run, run_file, events, fresh=fresh)
        try:
            with events.open(encoding="utf-8") as file:
                return _wait_for_workers(_EventReader(file, on_event), workers, stop_signal)
        finally:
            if workers.poll() is None:
                workers.terminate()
                workers.wait()


def _start_workers(run: RunConfig, run_file: Path, events: Path, *, fresh: bool) -> subprocess.Popen[bytes]:
    module = ["-m", "manyformer.train.worker", str(run_file), str(events), *(["fresh"] if fresh else [])]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.devices}"]
    threads = str(max(1, (os.cpu_count() or 1) // run.devices))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    # a new session: Ctrl-C at the terminal reaches only this process, which forwards it once, as SIGTERM
    return subprocess.Popen([sys.executable, *torchrun, *module], env=environment, start_new_session=True)


class _EventReader:
    """Reads the events that the main worker process has written so far; the first line is its process id."""

    def __init__(self, file: TextIO, on_event: EventListener) -> None:
        self._file, self._on_event, self._partial_line = file, on_event, ""
        self.worker_pid: int | None = None
        self.outcome: TrainResult | UserError | None = None

    def read_new_events(self) -> None:
        self._partial_line += self._file.read()
        *lines, self._partial_line = self._partial_line.split("\n")
        for line in lines:
            if self.worker_pid is None:
                self.worker_pid = int(line)
                continue
            event = decode(line)
            if isinstance(event, UserError):
                self.outcome = event
                continue
            self._on_event(event)
            if isinstance(event, TrainingFinished):
                self.outcome = event.result


def _wait_for_workers(reader: _EventReader, workers: subprocess.Popen[bytes], stop_signal: StopSignal) -> TrainResult:
    forwarded = False
    while True:
        has_ended = workers.poll() is not None
        reader.read_new_events()
        if has_ended:
            break
        if stop_signal and not forwarded and reader.worker_pid is not None:
            # the workers agree among themselves: one signal to one of them is enough
            os.kill(reader.worker_pid, signal.SIGTERM)
            forwarded = True
        time.sleep(POLL_SECONDS)
    outcome = reader.outcome
    if isinstance(outcome, TrainResult):
        return outcome
    if outcome is not None:
        raise outcome
    raise RuntimeError(f"the training processes ended with code {workers.returncode}; see their messages above")
