"""Numbers that are not finite: never the best score, never in the optimizer, and never in silence."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import a_run, make
from runs import Heard, go, learned

import manyformer as mf
from manyformer.base.files.json_records import validate_json
from manyformer.config import (
    AdadeltaConfig,
    AdafactorConfig,
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimConfig,
    SGDConfig,
)
from manyformer.models import Model
from manyformer.models.model_files import find_non_finite
from manyformer.training import session
from manyformer.training.engine import GradientNorms, MovementWatch, TrainingEngine
from manyformer.training.process_group import DDPStrategy
from manyformer.training.train_state import TrainState
from manyformer.training.training_loop import TrainingDiverged
from manyformer.training.validation import ResultRecord, Validator

WEIGHT = "body.0.ff.inner.up.weight"


def ranked(losses: list[float], keep: int) -> tuple[list[bool], list[int], int]:
    state = TrainState()
    best = []
    for step, loss in enumerate(losses, 1):
        state.step = step
        best.append(state.record_scores({"loss": loss}, loss, keep=keep))
    return best, [entry.step for entry in state.ranking], state.evaluations_since_best


def test_a_score_that_is_no_number_is_never_the_best() -> None:
    assert ranked([math.nan, 3.0, 2.0, 2.5], 1) == ([False, True, True, False], [3], 1)
    # and pushes no good one out of those that are kept
    assert ranked([3.0, math.nan, 2.0], 2) == ([True, False, True], [3, 1], 0)
    assert ranked([math.inf, math.nan], 1) == ([False, False], [], 2)


def test_a_ranking_of_version_0_2_0_loses_what_is_no_number() -> None:
    content = {"ranking": [[math.nan, 1, {"loss": math.nan}], [2.0, 3, {"loss": 2.0}]]}
    state = validate_json(content, TrainState, "state.json")
    assert [entry.step for entry in state.ranking] == [3]


def _with_validation_losses(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Make every validation give the next of these losses."""
    score = Validator.__call__
    remaining = iter(losses.values())

    def scored(self: Validator, *arguments: Any) -> dict[str, float] | None:
        scores = score(self, *arguments)
        return None if scores is None else scores | {"loss": next(remaining)}

    monkeypatch.setattr(Validator, "__call__", scored)


def test_a_validation_that_is_no_number_is_told_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_validation_losses(monkeypatch, {2: math.nan, 4: 3.0, 6: math.nan})
    heard = Heard()
    run = a_run(tmp_path / "run", limits={"steps": 6}, evaluate={"every": 2}, save={"every": 2})
    result = go(run, heard)
    assert result.chosen_weights == "those of step 4, the best"
    assert "the validation loss of step 2 is nan, which is no finite number: this step is never the best" in heard.notes


def test_a_run_without_any_score_ends_with_a_sentence_and_with_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_validation_losses(monkeypatch, {2: math.nan, 4: math.inf})
    heard = Heard()
    go(a_run(tmp_path / "run", limits={"steps": 4}, evaluate={"every": 2}), heard)
    assert "the loss of the final weights is inf, which is no finite number" in heard.notes

    def refuse(name: str) -> float:
        raise AssertionError(name)

    for file in [*(tmp_path / "run").rglob("*.json"), tmp_path / "run/metrics.jsonl"]:
        for text in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(text, parse_constant=refuse)
    assert ResultRecord.read(tmp_path / "run/result.json").scores["loss"] == math.inf


def engine(optim: OptimConfig) -> TrainingEngine:
    torch.manual_seed(3)
    model = mf.build("transformer-lm", vocab=11, dim=16, depth=1, heads=2)
    return TrainingEngine(model, optim, DDPStrategy())


UNCLIPPED = [
    AdamWConfig(max_grad_norm=None),
    AdamConfig(),
    AdagradConfig(max_weight_grad_norm=None),
    AdadeltaConfig(max_grad_norm=None),
    MuonConfig(lr=0.02, max_grad_norm=None),
    SGDConfig(max_grad_norm=None),
    LionConfig(max_grad_norm=None),
    AdafactorConfig(),
]


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
@pytest.mark.parametrize("factor", [1e35, math.inf, math.nan])
@pytest.mark.parametrize("optim", UNCLIPPED, ids=lambda optim: optim.name)
def test_a_gradient_that_the_optimizer_cannot_square_changes_nothing(
    optim: OptimConfig, factor: float, nonfinite: str
) -> None:
    training = engine(optim.model_copy(update={"nonfinite": nonfinite}))
    training.step([make("language-model", 1)], 0.01)
    weights = {name: weight.detach().clone() for name, weight in training.model.named_parameters()}
    handle = dict(training.model.named_parameters())[WEIGHT].register_hook(lambda gradient: gradient * factor)
    result = training.step([make("language-model", 2)], 0.01)
    assert training.name_of_gradient(result) == WEIGHT
    assert result.skipped == (nonfinite == "skip")
    assert all(torch.equal(weight, weights[name]) for name, weight in training.model.named_parameters())
    assert training.non_finite_tensors() == []
    handle.remove()
    training.step([make("language-model", 3)], 0.01)
    assert not any(torch.equal(weight, weights[name]) for name, weight in training.model.named_parameters())


def _spoiled(monkeypatch: pytest.MonkeyPatch, steps: set[int], factor: float) -> None:
    """Multiply the gradient of one weight in some steps."""
    build = session.build_model
    count = iter(range(1, 10_000))

    def build_spoiled(*arguments: Any) -> Model:
        model = build(*arguments)
        weight = dict(model.named_parameters())[WEIGHT]
        weight.register_hook(lambda gradient: gradient * (factor if next(count) in steps else 1.0))
        return model

    monkeypatch.setattr(session, "build_model", build_spoiled)


def test_a_gradient_too_large_to_square_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _spoiled(monkeypatch, {5}, 1e35)
    run = a_run(tmp_path / "run", optim={"max_grad_norm": None}, save={"every": 2})
    with pytest.raises(TrainingDiverged) as stopped:
        go(run)
    sentence = str(stopped.value)
    assert sentence.startswith("the norm of the gradient is ")
    assert f"at step 5 (first that of {WEIGHT})" in sentence
    assert "step-00000004" in sentence
    assert "optim.nonfinite=skip" in sentence


@pytest.mark.parametrize("clip", [None, 1.0])
def test_skipped_steps_are_counted_and_told(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoiled(monkeypatch, {3, 4}, math.inf)
    heard = Heard()
    optim = {"max_grad_norm": clip, "nonfinite": "skip"}
    go(a_run(tmp_path / "run", optim=optim, limits={"steps": 8}, log={"every": 4}), heard)
    assert heard.notes.count("step 3 was skipped: its loss is ") == 1
    assert "2 of 8 steps were skipped: their numbers were not finite" in heard.notes
    losses = [row["loss"] for row in learned(tmp_path / "run") if "loss" in row]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


def _spoil_state(model: TrainingEngine, kind: str) -> None:
    weight = dict(model.model.named_parameters())[WEIGHT]
    model.optimizer.state[weight][kind][0, 0] = math.inf


@pytest.mark.parametrize(
    ("optim", "kind"),
    [
        (AdamWConfig(), "exp_avg_sq"),
        (AdamConfig(), "exp_avg"),
        (AdagradConfig(), "sum"),
        (AdadeltaConfig(), "acc_delta"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_state_of_the_optimizer_that_is_not_finite_is_found(optim: OptimConfig, kind: str) -> None:
    training = engine(optim)
    training.step([make("language-model", 1)], 0.01)
    assert training.non_finite_tensors() == []
    _spoil_state(training, kind)
    assert training.non_finite_tensors() == [f"{WEIGHT}/{kind}"]


def _on_step(monkeypatch: pytest.MonkeyPatch, number: int, spoil: Callable[[TrainingEngine], None]) -> None:
    step, count = TrainingEngine.step, iter(range(1, 10_000))

    def stepped(self: TrainingEngine, *arguments: Any) -> Any:
        result = step(self, *arguments)
        if next(count) == number:
            spoil(self)
        return result

    monkeypatch.setattr(TrainingEngine, "step", stepped)


def test_an_optimizer_that_is_not_finite_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _on_step(monkeypatch, 5, lambda training: _spoil_state(training, "exp_avg_sq"))
    problem = (
        f"{WEIGHT}/exp_avg_sq is not finite: weights with such a state of the optimizer never move again at step 6"
    )
    with pytest.raises(TrainingDiverged, match=problem):
        go(a_run(tmp_path / "run", save={"every": 3}))


def test_weights_that_no_longer_move_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    run = a_run(tmp_path / "run", limits={"steps": 12}, save={"every": 4})
    go(run, heard)
    # at step 4 and 8 a few steps are too few to say so
    assert heard.notes.count("no weight has changed in the last 12 steps, although the learning rate was up to") == 1


def test_weights_that_move_are_not_told(tmp_path: Path) -> None:
    heard = Heard()
    go(a_run(tmp_path / "run", limits={"steps": 12}), heard)
    assert "no weight has changed" not in heard.notes


def test_one_changed_bit_is_movement() -> None:
    weights = [torch.nn.Parameter(torch.randn(50)), torch.nn.Parameter(torch.randn(3, 4).bfloat16())]
    watch = MovementWatch(weights)
    watch.begin()
    watch.count_step(0.1)
    with torch.no_grad():
        weights[1][2, 3] = torch.nextafter(weights[1][2, 3], torch.tensor(9.0, dtype=torch.bfloat16))
    assert watch.describe_standstill(run_ends=True) is None
    watch.begin()
    watch.count_step(0.0)
    # nothing can move at a learning rate of 0
    assert watch.describe_standstill(run_ends=True) is None


def test_the_norms_are_those_of_torch() -> None:
    weights = [
        torch.nn.Parameter(torch.randn(5, 3)),
        torch.nn.Parameter(torch.randn(7)),
        torch.nn.Parameter(torch.ones(2)),
    ]
    for weight in weights[:2]:
        weight.grad = torch.randn_like(weight)
    norms = GradientNorms.of(weights)
    assert norms is not None
    assert torch.equal(norms.total, torch.nn.utils.get_total_norm([weight.grad for weight in weights[:2]]))
    assert GradientNorms.of(weights[2:]) is None


def test_tensors_that_are_not_finite_are_named_in_order() -> None:
    tensors = {"a": torch.tensor([1.0, math.nan]), "b": torch.tensor([3e38] * 9), "c": torch.tensor([-math.inf])}
    tensors |= {"d": torch.tensor([7]), "e": torch.zeros(0), "f": torch.tensor(math.nan).bfloat16()}
    assert find_non_finite(tensors) == ["a", "c", "f"]
