"""A whole run: every task learns, the folder holds what it should, and an interruption changes nothing."""

from pathlib import Path

import pytest
from fakes import TASKS, a_run, opener

import manyformer as mf
from manyformer.base.system import StopSignal
from manyformer.config import RunConfig
from manyformer.training.events import TrainResult, silent
from manyformer.training.metrics import read_rows
from manyformer.training.session import TrainingSession


def go(run: RunConfig) -> TrainResult:
    assert run.out is not None
    out = Path(run.out)
    out.mkdir(exist_ok=True)
    return TrainingSession(run, out, silent, StopSignal(), opener).train()


@pytest.mark.parametrize("recipe", TASKS)
def test_every_task_learns(recipe: str, tmp_path: Path) -> None:
    small = {"dim": 16, "depth": 1, "heads": 2, "dropout": 0.0}
    # one that sees both sides of a gap has more to find out
    steps = 150 if recipe == "bert" else 60
    result = go(a_run(tmp_path / "run", recipe, limits={"steps": steps}, evaluate={"every": 20}, model=small))
    rows = list(read_rows(result.out / "metrics.jsonl"))
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.85 * losses[0]
    # guessing among three classes or six tokens
    assert result.scores["accuracy"] > 1.5 / (3 if TASKS[recipe] in ("classification", "tagging") else 6)
    model = mf.load(result.out)
    assert model.spec.recipe == recipe
