"""Two agents of torchrun as two machines: where one is lost with its process, the other goes on alone."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import RunConfig, dump_run
from manyformer.training import silent
from manyformer.training.process_group import ProcessFailed, name_lost_process

LONGEST = 400
"""Seconds that a part of the test may take on a busy machine."""

RENDEZVOUS = "last_call_timeout=2,join_timeout=300,keep_alive_interval=1,keep_alive_max_attempt=5"
"""An agent that is silent for five seconds is lost, and the others wait two seconds for more to join."""


def elastic_run(text: Path, out: Path) -> RunConfig:
    settings = {
        "recipe": "transformer-lm",
        "model": {"dim": 18, "depth": 1, "heads": 2},
        "data": {"kind": "text", "path": str(text), "tokenizer": "char", "length": 16},
        "batch": {"tokens": 112},
        "limits": {"steps": 60},
        "evaluate": {"every": 30},
        "save": {"every": 5},
        "log": {"every": 1},
        "device": "cpu",
        "strategy": "ddp",
        "process_timeout": 1.0,
        "out": str(out),
    }
    return RunConfig.model_validate(settings)


@contextmanager
def agent(port: int, file: Path, log: Path, *, is_host: bool) -> Iterator[subprocess.Popen[bytes]]:
    """One machine: torchrun with one process of a run; the one that is lost must not be the host of the others."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    command += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf={RENDEZVOUS},is_host={is_host}",
    ]
    command += ["-m", "manyformer", "train", str(file), "--quiet"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            yield process
        finally:
            lose(process)


def lose(machine: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its processes at once, as a machine that loses its power."""
    children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children")
    pids = [int(pid) for pid in children.read_text().split()] if machine.poll() is None else []
    machine.kill()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    machine.wait()


def wait_for_step(out: Path, step: int, machine: subprocess.Popen[bytes]) -> None:
    """Wait for a checkpoint of this step or a later one."""
    begun = time.monotonic()
    while not any(int(path.name.split("-")[1]) >= step for path in out.glob("checkpoints/step-*")):
        assert machine.poll() is None
        assert time.monotonic() - begun < LONGEST
        time.sleep(0.1)


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_the_other_machine_goes_on(tmp_path: Path, free_port: int) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be that is the question whether tis nobler in the mind " * 100)
    out, file = tmp_path / "run", tmp_path / "run.yaml"
    file.write_text(dump_run(elastic_run(text, out)))
    with ExitStack() as machines:
        first = machines.enter_context(agent(free_port, file, tmp_path / "first.log", is_host=True))
        second = machines.enter_context(agent(free_port, file, tmp_path / "second.log", is_host=False))
        wait_for_step(out, 10, first)
        lose(second)
        assert first.wait(LONGEST) == 0, (tmp_path / "first.log").read_text()
    log = (out / "log.txt").read_text()
    assert "2 processes (ddp)" in log
    assert "resuming from step " in log
    # the batches do not depend on the number of processes
    undisturbed = mf.train(elastic_run(text, tmp_path / "undisturbed"), on_event=silent)
    assert len(losses(out)) == 60
    assert losses(out) == pytest.approx(losses(undisturbed.out), rel=1e-4)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_starting_over_is_refused_where_torchrun_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match="fresh would start over whenever torchrun starts the processes again"):
        mf.train(elastic_run(tmp_path / "text.txt", tmp_path / "run"), fresh=True, on_event=silent)


def test_a_lost_peer_is_no_defect() -> None:
    """The message of gloo where the process at the other end of a connection was killed."""
    message = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:20122: Connection reset"
    )
    with (
        pytest.raises(ProcessFailed, match="another process of the run has gone or does not answer"),
        name_lost_process(),
    ):
        raise RuntimeError(message)
    with pytest.raises(RuntimeError, match="size mismatch"), name_lost_process():
        raise RuntimeError("size mismatch")
