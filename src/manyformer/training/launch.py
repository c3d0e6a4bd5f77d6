"""Launch a run in several processes on this machine and pass their events back to the caller.

Events and errors come from the worker processes (`manyformer.cli.training_worker`) as lines of JSON."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, get_args

import torch.distributed as dist
from pydantic import TypeAdapter

from manyformer.base.errors import TrainingInterrupted, UserError
from manyformer.base.files.atomic_files import DiskFull, NotWritable, append_bytes
from manyformer.base.files.json_text import json_text, with_named_numbers
from manyformer.base.system import StopSignal, handle_stop_signals
from manyformer.config import RunConfig
from manyformer.training.events import EventListener, TrainingEvent, TrainingFinished, TrainResult
from manyformer.training.process_group import ProcessFailed
from manyformer.training.training_loop import TrainingDiverged

POLL_SECONDS = 0.05
"""How often new events are read."""

FAILURE_SECONDS = 1.0
"""How long other processes may report failures after the first one, to find the first cause."""

LOG_FILE = "processes.log"
"""The file of the run folder with what the processes have printed."""

_EVENTS: dict[str, TypeAdapter[TrainingEvent]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(TrainingEvent)}
_ERRORS = {kind.__name__: kind for kind in (DiskFull, NotWritable, TrainingDiverged, TrainingInterrupted, UserError)}


def launch(run: RunConfig, *, fresh: bool, on_event: EventListener) -> TrainResult:
    """Train with `run.devices` processes on this machine and return their result."""
    with (
        handle_stop_signals() as stop_signal,
        stop_signal.awaited(),
        _started_workers(run, fresh=fresh) as workers,
    ):
        return _wait_for_result(workers, run, stop_signal, on_event)


class WorkerFailure(NamedTuple):
    """The error that ended a worker process, and its time; `traceback` is empty for an error of the user's input."""

    kind: str
    message: str
    traceback: str
    at: float

    @classmethod
    def of(cls, error: Exception) -> "WorkerFailure":
        """The failure that an exception describes."""
        kind = type(error).__name__
        if isinstance(error, UserError):
            return cls(kind if kind in _ERRORS else "UserError", str(error), "", time.monotonic())
        return cls(kind, str(error), traceback.format_exc(), time.monotonic())

    @property
    def is_timeout(self) -> bool:
        """Whether the process has waited in vain for another one."""
        return bool(self.traceback) and "timed out" in self.message.lower()

    def as_error(self, process: str) -> Exception:
        """The error to raise in the process that launched this one; a defect has the traceback as its cause."""
        if self.kind in _ERRORS:
            return _ERRORS[self.kind](self.message)
        error = RuntimeError(f"{process}: {self.kind}: {self.message}")
        error.__cause__ = RuntimeError(f"\n{self.traceback}")
        return error


class _Worker:
    """A worker process with its result or failure."""

    def __init__(self, run: RunConfig, rank: int, port: int, *, fresh: bool) -> None:
        self.name = f"process {rank} of {run.devices}"
        self.result: TrainResult | None = None
        self.failure: WorkerFailure | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._partial_line = b""
        self._events, written = os.pipe()
        os.set_blocking(self._events, False)
        # a new session: Ctrl-C at the terminal reaches only this process, which forwards it once, as SIGTERM
        self.process = subprocess.Popen(
            # without the current folder, whose files may have the names of modules
            [sys.executable, "-P", "-m", "manyformer.cli.training_worker", str(written)],
            env=_environment(run.devices, rank, port),
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[written],
            start_new_session=True,
        )
        os.close(written)
        assert self.process.stdin is not None
        # the pipe stays open: its end tells the worker that this process is gone
        with suppress(BrokenPipeError):
            self.process.stdin.write(
                json_text([run.model_dump(mode="json", by_alias=True), fresh], ensure_ascii=True).encode() + b"\n"
            )
            self.process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def has_failed(self) -> bool:
        return self.failure is not None or self.process.poll() not in (None, 0)

    @property
    def ending_signal(self) -> str | None:
        """The signal that has ended this process."""
        code = self.process.poll()
        if code is None or code >= 0:
            return None
        return signal.Signals(-code).name

    def read_events(self, on_event: EventListener) -> None:
        """Report the events that the process has sent since the last call."""
        with suppress(BlockingIOError):
            while sent := os.read(self._events, 1 << 16):
                self._partial_line += sent
        # a pipe may end within a line, the rest of which comes with the next call
        *lines, self._partial_line = self._partial_line.split(b"\n")
        for line in lines:
            event = decode(line.decode())
            if isinstance(event, WorkerFailure):
                self.failure = event
                continue
            on_event(event)
            if isinstance(event, TrainingFinished):
                self.result = event.result

    def close(self) -> bytes:
        """End the process if it still runs; returns what it has printed."""
        self.process.kill()
        self.process.wait()
        os.close(self._events)
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        with self._output:
            self._output.seek(0)
            return self._output.read()


def _environment(size: int, rank: int, port: int) -> dict[str, str]:
    """The environment of a worker: the variables that torchrun would set, and its share of the processor."""
    # processes that each use all cores would wait for one another
    threads = str(max(1, (os.cpu_count() or 1) // size))
    group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    # the processes meet at the store of the launching process
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    counters = {"TORCHELASTIC_RESTART_COUNT": 0}
    variables = {name: str(value) for name, value in (group | store | counters).items()}
    return {"OMP_NUM_THREADS": threads, **os.environ, **variables}


@contextmanager
def _started_workers(run: RunConfig, *, fresh: bool) -> Iterator[Sequence[_Worker]]:
    """The processes of a run, which end with the block; what they have printed is in a file of the run folder."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    workers: list[_Worker] = []
    try:
        for rank in range(run.devices):
            workers.append(_Worker(run, rank, store.port, fresh=fresh))
        yield workers
    finally:
        # `close` ends what still runs, so that no process outlives the command
        printed = [(worker.name, worker.close()) for worker in workers]
        folder = Path(str(run.out))
        if folder.is_dir() and any(text for _, text in printed):
            lines = [f"{name}:\n".encode() + text for name, text in printed if text]
            append_bytes(folder / LOG_FILE, b"".join(lines))


def _wait_for_result(
    workers: Sequence[_Worker], run: RunConfig, stop_signal: StopSignal, on_event: EventListener
) -> TrainResult:
    forwarded = False
    failed_at: float | None = None
    while True:
        # asked first: what a process sent before its end is then read below
        all_ended = all(worker.has_ended for worker in workers)
        for worker in workers:
            worker.read_events(on_event)
        if failed_at is None and any(worker.has_failed for worker in workers):
            failed_at = time.monotonic()
        patience = 0.0 if forwarded else FAILURE_SECONDS
        if all_ended or (failed_at is not None and time.monotonic() - failed_at > patience):
            break
        if stop_signal and not forwarded:
            # the workers agree among themselves: one signal to one of them is enough
            workers[0].process.terminate()
            forwarded = True
        time.sleep(POLL_SECONDS)
    if workers[0].result is not None:
        return workers[0].result
    raise _cause(workers, run, stopped=forwarded)


def _cause(workers: Sequence[_Worker], run: RunConfig, *, stopped: bool) -> Exception:
    """The error that ended the run: the first one, because others follow from it."""
    log = Path(str(run.out)) / LOG_FILE
    failures = [(worker.failure, worker.name) for worker in workers if worker.failure is not None]
    # torch aborts processes whose peer has gone, which is no first cause
    killed = [worker for worker in workers if worker.ending_signal not in (None, "SIGABRT")]
    if stopped and not any(failure.kind == "TrainingInterrupted" for failure, _ in failures):
        return TrainingInterrupted("stopped. The same command continues.")
    if killed:
        hint = ""
        if killed[0].ending_signal == "SIGKILL":
            hint = " (as the system does where memory runs out)"
        problem = f"{killed[0].name} was ended by {killed[0].ending_signal}{hint}"
    elif failures:
        # the first failure; the others report that a process has gone
        failure, name = min(failures, key=lambda entry: entry[0].at)
        silent = [worker.name for worker in workers if worker.failure is None and not worker.has_ended]
        if not failure.is_timeout or not silent:
            return failure.as_error(name)
        problem = f"{silent[0]} has not answered for {run.process_timeout:g} minutes (process_timeout)"
    else:
        failed = next(worker for worker in workers if worker.has_failed)
        problem = f"{failed.name} ended with {failed.ending_signal or f'code {failed.process.poll()}'}"
    return ProcessFailed(f"{problem}. The same command continues; what the processes printed is in {log}")


def encode(event: TrainingEvent | WorkerFailure) -> str:
    """Encode an event or failure as one line of JSON."""
    kind = type(event).__name__
    if isinstance(event, WorkerFailure):
        content = event
    else:
        content = _EVENTS[kind].dump_python(event, mode="json")
    # seconds that are not known yet and a score may be NaN, which the reader restores
    return json_text(with_named_numbers([kind, content]), ensure_ascii=True)


def decode(line: str) -> TrainingEvent | WorkerFailure:
    """Decode a line that `encode` returned."""
    kind, content = json.loads(line)
    if kind == "WorkerFailure":
        return WorkerFailure(*content)
    return _EVENTS[kind].validate_python(content)
