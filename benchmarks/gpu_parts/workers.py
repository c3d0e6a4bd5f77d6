"""Items run in a process of their own: after a crash of the driver, or past its time, a fresh one goes on."""

import json
import multiprocessing
import re
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch

from gpu_parts.kept_results import KeptItem
from gpu_parts.outcome import Outcome, Setting

_STICKY = re.compile(r"CUDA error|device-side assert|illegal memory|CUBLAS_STATUS|cuDNN error", re.IGNORECASE)
"""After these a process can use its GPU no more."""


def run_item(setting: Setting, name: str) -> tuple[Outcome, bool]:
    """The outcome of an item, where an exception is a failure, and whether this process can go on."""
    from gpu_parts.waves import all_items

    # an item may allow TF32, which no later one shall inherit
    torch.set_float32_matmul_precision("highest")
    try:
        torch.manual_seed(0)
        return all_items(setting)[name](), True
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = re.sub(r"\s+", " ", str(error)).strip()[:400]
        sentence = f"{type(error).__name__}: {text} ({place.name}, {place.filename.rpartition('/')[2]}:{place.lineno})"
        return Outcome("failed", sentence), not _STICKY.search(text)


def serve(connection: Connection, setting: Setting) -> None:
    """Run the items whose names arrive, until an empty name arrives or the GPU is lost."""
    can_go_on = True
    while can_go_on and (name := connection.recv_bytes().decode()):
        outcome, can_go_on = run_item(setting, name)
        if setting.on_gpu and can_go_on:
            torch.cuda.empty_cache()
        connection.send_bytes(json.dumps([*outcome[:2], dict(outcome.numbers), list(outcome.paths)]).encode())


class Workers:
    """One worker process at a time."""

    def __init__(self, setting: Setting, target: Callable[[Connection, Setting], None] = serve) -> None:
        self.setting, self._target = setting, target
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._hangs = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self._stop()

    def run(self, name: str, limit: float) -> KeptItem | None:
        """Run an item; None if it was not finished after `limit` seconds."""
        started = time.monotonic()
        connection = self._connected()
        try:
            connection.send_bytes(name.encode())
            if not connection.poll(limit):
                self._hangs = True
                self._stop()
                return None
            outcome = Outcome(*json.loads(connection.recv_bytes()))
        except (EOFError, ConnectionError):
            assert self._process is not None
            self._process.join()
            code = self._process.exitcode
            self._stop()
            outcome = Outcome("failed", f"the process died with exit code {code}")
        return KeptItem.of(outcome, time.monotonic() - started)

    def _connected(self) -> Connection:
        if self._process is None or not self._process.is_alive() or self._connection is None:
            self._stop()
            # a process that has asked for its GPUs cannot be forked
            context = multiprocessing.get_context("spawn" if self.setting.on_gpu else "fork")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=self._target, args=(theirs, self.setting), daemon=True)
            self._process.start()
            # ours alone is left open here, so that its end is noticed
            theirs.close()
        return self._connection

    def _stop(self) -> None:
        if self._process is not None and self._connection is not None:
            if not self._hangs:
                with suppress(OSError):
                    self._connection.send_bytes(b"")
                    self._process.join(10)
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process, self._connection, self._hangs = None, None, False
