"""Several processes from one call: the run is carried out through torchrun, and its events come back."""

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
from manyformer.train.events import EventListener, TrainingFinished
from manyformer.train.session import TrainResult
from manyformer.train.signals import StopSignal, listening

# How often the events are looked for, in seconds.
GLANCE = 0.05


def launch(run: RunConfig, *, fresh: bool, tell: EventListener) -> TrainResult:
    """Train with `run.devices` processes on this machine."""
    with tempfile.TemporaryDirectory(prefix="manyformer-") as room, listening(patient=True) as wish:
        run_file, events = Path(room) / "run.yaml", Path(room) / "events"
        replace_text(run_file, dump_run(run))
        events.touch()
        workers = _start(run, run_file, events, fresh=fresh)
        try:
            with events.open(encoding="utf-8") as file:
                return _follow(_Follower(file, tell), workers, wish)
        finally:
            if workers.poll() is None:
                workers.terminate()
                workers.wait()


def _start(run: RunConfig, run_file: Path, events: Path, *, fresh: bool) -> subprocess.Popen[bytes]:
    module = ["-m", "manyformer.train.worker", str(run_file), str(events), *(["fresh"] if fresh else [])]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.devices}"]
    threads = str(max(1, (os.cpu_count() or 1) // run.devices))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    # a session of its own: Ctrl-C at the terminal comes to us alone, and we pass it on once, as a wish
    return subprocess.Popen([sys.executable, *torchrun, *module], env=environment, start_new_session=True)


class _Follower:
    """Reads what the workers say, as far as it is there."""

    def __init__(self, file: TextIO, tell: EventListener) -> None:
        self._file, self._tell, self._rest = file, tell, ""
        self.first: int | None = None
        self.end: TrainingFinished | UserError | None = None

    def catch_up(self) -> None:
        self._rest += self._file.read()
        *lines, self._rest = self._rest.split("\n")
        for line in lines:
            if self.first is None:
                self.first = int(line)
                continue
            said = decode(line)
            if isinstance(said, UserError):
                self.end = said
                continue
            self._tell(said)
            if isinstance(said, TrainingFinished):
                self.end = said


def _follow(follower: _Follower, workers: subprocess.Popen[bytes], wish: StopSignal) -> TrainResult:
    passed_on = False
    while True:
        over = workers.poll() is not None
        follower.catch_up()
        if over:
            break
        if wish and not passed_on and follower.first is not None:
            # the workers agree among themselves: one that was asked is enough
            os.kill(follower.first, signal.SIGTERM)
            passed_on = True
        time.sleep(GLANCE)
    end = follower.end
    if isinstance(end, TrainingFinished):
        return TrainResult(end.out, end.step, end.why, end.chosen, end.scores)
    if end is not None:
        raise end
    raise RuntimeError(f"the training processes ended with code {workers.returncode}; their messages stand above")
