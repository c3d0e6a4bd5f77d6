"""When a run ends, how far it is, and which evaluations were the best."""

from pathlib import Path
from typing import Any

import pytest
from fakes import a_run
from runs import Heard, go, learned

from manyformer.models.tasks import ScoreSums
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.batches import TextUnits
from manyformer.training.checkpoints import CheckpointState
from manyformer.training.train_state import MetricsWindow, RankedCheckpoint, TrainState, end_reason, run_progress
from manyformer.training.training_loop import describe_waiting_threads


@pytest.mark.parametrize(
    ("limits", "done", "why"),
    [
        ({"steps": 10}, 0.5, None),
        ({"steps": 5}, 1.0, "limits.steps 5 reached"),
        ({"epochs": 0.5}, 0.8, None),
        ({"epochs": 0.4}, 1.0, "limits.epochs 0.4 reached"),
        ({"tokens": 1000, "steps": 100}, 0.3, None),
        ({"tokens": 300, "steps": 100}, 1.0, "limits.tokens 300 reached"),
        ({"minutes": 4}, 0.5, None),
        ({"minutes": 2, "epochs": 9}, 1.0, "limits.minutes 2 reached"),
        ({"cpu_minutes": 2, "minutes": 9}, 0.75, None),
        ({"cpu_minutes": 1.5}, 1.0, "limits.cpu_minutes 1.5 reached"),
    ],
)
def test_limits(limits: dict[str, Any], done: float, why: str | None, tmp_path: Path) -> None:
    run = a_run(tmp_path, limits=limits)
    standing = TrainState(step=5, tokens=300, epochs=0.4, seconds=120.0, cpu_seconds=90.0)
    assert run_progress(run, standing) == pytest.approx(done)
    assert end_reason(run, standing) == why


def test_threads_that_wait_are_told_unless_somebody_chose_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    waiting = describe_waiting_threads(10.0, 3.4, 2)
    assert waiting is not None
    assert waiting.startswith("2 threads computed for 3.4 of the first 10.0 s")
    assert describe_waiting_threads(10.0, 9.0, 2) is None
    assert describe_waiting_threads(10.0, 3.4, 1) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert describe_waiting_threads(10.0, 3.4, 2) is None


def test_waiting_threads_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyformer.training import training_loop

    calls: list[float] = []

    def describe(seconds: float, cpu_seconds: float, threads: int) -> str:
        calls.append(seconds)
        return "they wait"

    monkeypatch.setattr(training_loop, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(training_loop, "describe_waiting_threads", describe)
    heard = Heard()
    go(a_run(tmp_path, limits={"steps": 4}), heard)
    assert heard.notes.count("they wait") == len(calls) == 1


def test_a_run_that_ends_within_its_warm_up_says_so(tmp_path: Path) -> None:
    heard = Heard()
    limits = {"tokens": 96, "steps": 1000}
    go(a_run(tmp_path / "short", limits=limits, schedule={"warmup": 100}, evaluate={"every": None}), heard)
    assert "ended within its warm-up, after" in heard.notes
    heard = Heard()
    go(a_run(tmp_path / "long", limits={"steps": 20}, schedule={"warmup": 5}, evaluate={"every": None}), heard)
    assert "warm-up" not in heard.notes


def test_patience_counts_from_the_best(tmp_path: Path) -> None:
    run = a_run(tmp_path, evaluate={"every": 1, "patience": 2})
    standing = TrainState()
    events = []
    for step, loss in enumerate([3.0, 2.0, 2.5, 1.9, 2.0, 1.9], start=1):
        standing.step = step
        assert end_reason(run, standing) is None
        events.append(standing.record_scores({"loss": loss}, loss, keep=2))
    assert events == [True, True, False, True, False, False]
    assert "2 evaluations in a row" in str(end_reason(run, standing))
    # the earlier of equals comes first
    assert [entry.step for entry in standing.ranking] == [4, 6]


def test_a_standing_survives_json(tmp_path: Path) -> None:
    ranking = [RankedCheckpoint(0.1, 3, {"loss": 0.1})]
    standing = TrainState(7, 11, 0.1 + 0.2, 1.5, ranking=ranking, window=MetricsWindow(nats=0.1, targets=3))
    state = CheckpointState(step=7, train_state=standing, data={"epoch": 0, "batch": 2, "seed": 1, "data": "a"})
    state.write(tmp_path / "state.json")
    assert CheckpointState.read(tmp_path / "state.json").train_state == standing


def test_scores() -> None:
    sums = ScoreSums(10.0, 5, 2)
    scores = LANGUAGE_MODELLING.validation(sums, TextUnits(targets=5, characters=18, bytes=20))
    assert scores["loss"] == 2.0
    assert scores["accuracy"] == 0.4
    assert scores["perplexity"] == pytest.approx(7.389, abs=1e-3)
    assert scores["bits_per_byte"] == pytest.approx(2 / 0.6931472 / 4)
    assert "bits_per_byte" not in LANGUAGE_MODELLING.validation(sums, None)


def test_a_run_ends_at_its_target(tmp_path: Path) -> None:
    run = a_run(tmp_path, evaluate={"every": 1, "target": 2.5})
    standing = TrainState(step=1)
    assert end_reason(run, standing) is None
    standing.reached_target = 2.5
    assert end_reason(run, standing) == "loss of 2.5 reached (evaluate.target)"
    # a run with another target goes on
    assert end_reason(a_run(tmp_path, evaluate={"every": 1, "target": 2.0}), standing) is None


def test_the_first_validation_that_reaches_the_target_ends_the_run(tmp_path: Path) -> None:
    result = go(a_run(tmp_path / "run", limits={"steps": 400}, evaluate={"every": 2, "target": 1e3}))
    assert (result.step, result.reason) == (2, "loss of 1000 reached (evaluate.target)")


def test_early_stopping(tmp_path: Path) -> None:
    """A learning rate that ruins the model: the run ends early and the best weights are kept."""
    evaluate = {"every": 2, "patience": 3}
    result = go(
        a_run(
            tmp_path / "run",
            limits={"steps": 400},
            evaluate=evaluate,
            optim={"lr": 3.0, "name": "adam", "max_grad_norm": 1.0},
        )
    )
    assert result.step < 400
    assert result.reason.startswith("3 evaluations in a row without a better one")
    valid = [row["valid_loss"] for row in learned(result.out) if "valid_loss" in row]
    assert result.scores["loss"] == min(valid)


def test_epochs_and_evaluation_at_the_end_alone(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", limits={"epochs": 1.6}, evaluate={"every": None}, save={"every": 100, "keep_best": 0})
    result = go(run)
    # five batches an epoch
    assert result.step == 8
    assert [row["step"] for row in learned(result.out) if "valid_loss" in row] == [8]
    assert [path.name for path in (result.out / "checkpoints").iterdir()] == ["step-00000008"]
    assert result.chosen_weights == "those of the last step, 8"


@pytest.mark.parametrize("clock", ["minutes", "cpu_minutes"])
def test_minutes(clock: str, tmp_path: Path) -> None:
    result = go(a_run(tmp_path / "run", limits={clock: 0.005}, log={"every": 1}))
    rates = [row["learning_rate"] for row in learned(result.out) if "loss" in row]
    assert result.reason == f"limits.{clock} 0.005 reached"
    assert rates[-1] < max(rates)
