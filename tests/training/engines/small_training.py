"""A training whose steps take long enough that a cluster can lose a node between two of them."""

import json
import re
from pathlib import Path

import pytest
from isolated_nodes import wait_for

import manyformer as mf
from manyformer.config import RunConfig
from manyformer.training import silent

STEPS = 40

SAVE_EVERY = 5

RUN = {
    "recipe": "transformer-lm",
    "model": {"dim": 18, "depth": 1, "heads": 2},
    "data": {"kind": "text", "tokenizer": "char", "length": 16},
    "batch": {"tokens": 112},
    "limits": {"steps": STEPS},
    "evaluate": {"every": STEPS},
    "save": {"every": SAVE_EVERY},
    "log": {"every": 1},
    "device": "cpu",
    "process_timeout": 1.0,
}

SLOW_STEPS = """
import time
from manyformer.training.training_loop import TrainingLoop

take_step = TrainingLoop._take_step

def take_slow_step(loop):
    time.sleep(0.3)
    take_step(loop)

TrainingLoop._take_step = take_slow_step
"""


def write_run(folder: Path, **changes: object) -> Path:
    """A folder with mine.yaml, as the launch files read it."""
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text("to be or not to be that is the question whether tis nobler in the mind " * 100)
    (folder / "slow_steps.py").write_text(SLOW_STEPS)
    settings = {**RUN, "data": {**RUN["data"], "path": str(text)}, "import": ["slow_steps.py"], **changes}  # type: ignore[dict-item]
    # JSON is YAML
    (folder / "mine.yaml").write_text(json.dumps(settings))
    return folder


def losses(out: Path) -> list[float]:
    """The loss of each step, of the processes that made it last."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def wait_for_step(out: Path, step: int) -> None:
    """Wait until a step is in the metrics."""
    metrics = out / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(losses(out)) >= step, f"step {step} of {out}")


def resumed_steps(out: Path) -> list[int]:
    return [int(step) for step in re.findall(r"resuming from step (\d+)", (out / "log.txt").read_text())]


def assert_resumed_once_from_a_checkpoint(out: Path) -> None:
    """After a lost node the run continues from a multiple of `save.every`; that it did so shows that it was lost."""
    (step,) = resumed_steps(out)
    assert step >= 10
    assert step % SAVE_EVERY == 0


def assert_losses_of_an_unbroken_run(out: Path, folder: Path) -> None:
    """Compare with one process that nothing has stopped; the batches do not depend on the number of processes."""
    settings = {**RUN, "data": {**RUN["data"], "path": str(folder / "text.txt")}, "out": str(folder / "unbroken")}  # type: ignore[dict-item]
    unbroken = mf.train(RunConfig.model_validate(settings), on_event=silent)
    assert len(losses(out)) == STEPS
    assert losses(out) == pytest.approx(losses(unbroken.out), rel=1e-4)
