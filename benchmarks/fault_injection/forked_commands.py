"""Commands of manyformer in forks of this process, which has loaded everything: tenths of a second instead of five."""

import contextlib
import hashlib
import importlib
import os
import pkgutil
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TRIAL_VARIABLE = "MANYFORMER_DRILL"
"""Stands in the environment of every process that a trial starts, so that those left over can be seen."""

EXTRA_MEMORY = 3 << 30
"""Address space that a command may take beyond that of this process."""

LONGEST_OUTPUT = 1 << 24
"""So many characters of what a command says are kept."""

LOAD = "mf.load"
"""The first argument of a command that is `manyformer.load` and a forward pass instead of a command line."""


SENTINEL = "code-ran"
"""The file beside the folder of the trials that planted code would make."""


@dataclass(frozen=True)
class Surroundings:
    """What a command finds around it, other than its folder and its arguments."""

    input: bytes = b""
    """What stands on standard input."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables of the environment, None for one that is taken away."""
    closed: tuple[int, ...] = ()
    """The standard streams that are closed: 0, 1, 2."""
    umask: int | None = None
    user: int | None = None
    """The number of the user that the command belongs to."""
    file_size: int | None = None
    """No file may become larger."""
    fresh: bool = False
    """Whether a new Python begins, which costs seconds, instead of a fork that has loaded everything."""
    without_folder: bool = False
    """Whether the folder that the command begins in is gone."""


@dataclass(frozen=True)
class CommandResult:
    """What a command ended with; the code is None if it did not end in time."""

    arguments: tuple[str, ...]
    code: int | None
    output: str
    errors: str
    seconds: float
    ran_code: bool = False
    """Whether planted code has run."""

    def __str__(self) -> str:
        return " ".join(self.arguments if self.arguments[0] == LOAD else ("manyformer", *self.arguments))


class RunningCommand:
    """A command in a process and a session of its own, in the folder `folder`."""

    def __init__(self, arguments: Sequence[str], folder: Path, surroundings: Surroundings | None = None) -> None:
        self.arguments = tuple(arguments)
        self._sentinel = folder.parent / SENTINEL
        self._sentinel.unlink(missing_ok=True)
        self._logs = [folder.parent / name for name in ("output.txt", "errors.txt")]
        self._began = time.monotonic()
        self._code: int | None = None
        for log in self._logs:
            log.unlink(missing_ok=True)
            # here, because a command may be killed before it would make them
            log.touch()
        sys.stdout.flush()
        sys.stderr.flush()
        # a signal that comes before the command has begun waits until it has
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        self.pid = os.fork()
        if not self.pid:
            _become(self.arguments, folder, self._logs, surroundings or Surroundings(), mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def send(self, number: int) -> None:
        """Send a signal to the command's first process."""
        os.kill(self.pid, number)

    def send_quietly(self, number: int = signal.SIGINT) -> None:
        """Send a signal, unless the command has ended."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                self.send(number)

    def said(self) -> str:
        """What the command has printed so far."""
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in self._logs if log.exists())

    def ended(self, seconds: float) -> int | None:
        """The exit code, negative for a signal, as soon as the command ends; None if it takes longer than that."""
        end = time.monotonic() + seconds
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                break
            if time.monotonic() >= end:
                return None
            time.sleep(0.003)
        return self._code

    def wait(self, seconds: float) -> CommandResult:
        """The result; a command that takes longer is killed, with all processes of its session."""
        code = None
        try:
            code = self.ended(seconds)
        finally:
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        output, errors = (
            log.read_text(encoding="utf-8", errors="backslashreplace")[:LONGEST_OUTPUT] for log in self._logs
        )
        ran_code = self._sentinel.exists()
        return CommandResult(self.arguments, code, output, errors, time.monotonic() - self._began, ran_code)


def _become(
    arguments: tuple[str, ...],
    folder: Path,
    logs: list[Path],
    surroundings: Surroundings,
    mask: set[int | signal.Signals],
) -> None:
    """Be the command, in the process that has just been forked, and never return."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # a shell's background jobs, and their children, ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.chdir(folder)
        # as `python -m manyformer` has it
        sys.path.insert(0, str(folder))
        os.dup2(_stdin_of(surroundings.input), 0)
        for number, log in enumerate(logs, 1):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        # whatever the streams of this process are, those of the command are the files
        sys.stdin = os.fdopen(0, encoding="utf-8")
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
        os.environ[TRIAL_VARIABLE] = str(folder)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        memory = _address_space() + EXTRA_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        _surround(surroundings, folder)
        if surroundings.fresh:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execve(sys.executable, [sys.executable, "-m", "manyformer", *arguments], os.environ)
        from manyformer.cli import run

        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            code = load_and_run(arguments[1]) if arguments[0] == LOAD else run(arguments)
        except KeyboardInterrupt:
            code = 130
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _stdin_of(content: bytes) -> int:
    """A pipe that holds the bytes and has an end, or an empty device."""
    if not content:
        return os.open(os.devnull, os.O_RDONLY)
    reader, writer = os.pipe()
    # what does not fit into a pipe would wait for a reader
    os.write(writer, content[: 1 << 15])
    os.close(writer)
    return reader


def _surround(surroundings: Surroundings, folder: Path) -> None:
    """Change what the process finds around it; the user last, who may do the least."""
    if surroundings.file_size is not None:
        # a module that is imported from here on would leave the beginning of its compiled file for later processes
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (surroundings.file_size, surroundings.file_size))
    for name, value in surroundings.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if surroundings.umask is not None:
        os.umask(surroundings.umask)
    if surroundings.without_folder:
        shutil.rmtree(folder)
    if surroundings.user is not None:
        os.setgroups([])
        os.setgid(surroundings.user)
        os.setuid(surroundings.user)
    for number in surroundings.closed:
        os.close(number)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def load_and_run(folder: str) -> int:
    """`manyformer.load` and its way of telling a mistake; prints the digest of all weights."""
    import manyformer
    from manyformer.base.errors import UserError

    try:
        model = manyformer.load(folder)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(name.encode() + weight.detach().numpy().tobytes())
    print(digest.hexdigest())
    return 0


def load_everything() -> None:
    """Import what commands import, and what torch imports when the first optimizer is made; start no thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch

    import manyformer

    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(manyformer.__path__, "manyformer."):
        if not module.name.endswith(("__main__", ".worker")):
            importlib.import_module(module.name)
    importlib.import_module("matplotlib.backends.backend_agg")
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.zeros(2, 2)
    torch.optim.AdamW([weight], fused=True).step()


def left_over_processes(folder: Path) -> list[int]:
    """The processes of a trial in `folder` that still run, other than this one's forks."""
    mark = f"{TRIAL_VARIABLE}={folder}\0".encode()
    running = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and mark in (process / "environ").read_bytes() + b"\0":
                running.append(int(process.name))
    return running
