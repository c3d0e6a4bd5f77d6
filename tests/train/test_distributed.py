"""Two real processes learn what one learns; what two have saved one goes on with, and the other way round."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import manyformer as mf
from manyformer.config import RunConfig
from manyformer.errors import UserError
from manyformer.train import (
    TrainingEvent,
    TrainingFinished,
    TrainingInterrupted,
    TrainingProgress,
    TrainingStarted,
    TrainResult,
    silent,
)


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


def test_one_then_two_with_shares_then_one(text: Path, alone: TrainResult, tmp_path: Path) -> None:
    out = tmp_path / "run"
    heard: list[TrainingEvent] = []
    with pytest.raises(TrainingInterrupted):
        mf.train(a_run(text, out), on_event=asking(3, []))
    with pytest.raises(TrainingInterrupted, match=r"stopped at step \d+, saved. The same command continues."):
        mf.train(a_run(text, out, devices=2, strategy="fsdp", save={"every": 1}), on_event=asking(6, heard))
    assert isinstance(heard[0], TrainingStarted)
    assert "2 processes (fsdp)" in dict(heard[0].summary_lines)["device"]
    last = sorted((out / "checkpoints").iterdir())[-1]
    assert len(list(last.glob("shard-*.safetensors"))) == 2
    assert not list(last.glob("*.metadata"))
    result = mf.train(a_run(text, out), on_event=silent)
    same(out, alone)
    assert result.load().spec == alone.load().spec


def test_two_with_copies_go_on_from_one_to_the_end(text: Path, alone: TrainResult, tmp_path: Path) -> None:
    out = tmp_path / "run"
    heard: list[TrainingEvent] = []
    with pytest.raises(TrainingInterrupted):
        mf.train(a_run(text, out), on_event=asking(6, []))
    result = mf.train(a_run(text, out, devices=2), on_event=heard.append)
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
    result = mf.train(a_run(text, tmp_path / "two", devices=2, strategy="fsdp", **common), on_event=silent)
    same(tmp_path / "two", alone)
    assert result.scores == pytest.approx(alone.scores, rel=1e-4)
    assert sum(weight.numel() for weight in result.load().parameters()) > 1000


def test_a_mistake_is_told_once_and_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        mf.train(a_run(tmp_path / "nowhere.txt", tmp_path / "run", devices=2), on_event=silent)
    assert "Traceback" not in capfd.readouterr().err


def test_several_processes_need_a_strategy(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyformer.train.build_model import choose_strategy
    from manyformer.train.process_group import ProcessGroup

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
