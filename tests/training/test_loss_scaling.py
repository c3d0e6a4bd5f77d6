"""Training in float16: gradients that are too small or too large for it, and runs that go on exactly."""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import a_run, make
from runs import Heard, go, learned, stopped
from torch import Tensor

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.config import AdadeltaConfig, AdagradConfig, AdamConfig, AdamWConfig, OptimConfig
from manyformer.models import BatchLoss
from manyformer.nn.batches import Batch
from manyformer.nn.ops.chunked_cross_entropy import LossOptions, chunked_cross_entropy
from manyformer.recipes import RECIPES
from manyformer.recipes.parts.registry import task_of
from manyformer.training.build_model import choose_autocast
from manyformer.training.engine import MAX_OVERFLOWS_IN_ROW, LossScale, TrainingEngine, full_tensor
from manyformer.training.process_group import DDPStrategy, ParallelStrategy, ProcessGroup
from manyformer.training.training_loop import TrainingDiverged

OPTIMIZERS: list[OptimConfig] = [AdamWConfig(), AdamConfig(), AdagradConfig(), AdadeltaConfig()]
FIRST_SCALE = 65536.0


def engine(
    optim: OptimConfig,
    *,
    autocast: torch.dtype | None = torch.float16,
    factor: float = 1.0,
    nonfinite: str = "stop",
    strategy: ParallelStrategy | None = None,
) -> TrainingEngine:
    """A tiny language model whose loss is `factor` times what it should be."""
    torch.manual_seed(0)
    model = mf.build("transformer-lm", vocab=11, dim=16, depth=1, heads=2)
    loss = model.loss

    def scaled_loss(batch: Batch, **options: Any) -> BatchLoss:
        result = loss(batch, **options)
        return result._replace(total=result.total * factor)

    model.loss = scaled_loss  # type: ignore[method-assign]
    optim = optim.model_copy(update={"nonfinite": nonfinite})
    return TrainingEngine(model, optim, strategy or DDPStrategy(), autocast=autocast)


def weights_of(training: TrainingEngine) -> list[Tensor]:
    return [weight.detach().clone() for weight in training.weights]


def scale_of(training: TrainingEngine) -> LossScale:
    assert training.loss_scaler is not None
    return training.loss_scaler.state


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: optim.name)
@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_an_overflow_skips_the_step_and_halves_the_scale(optim: OptimConfig, nonfinite: str) -> None:
    training = engine(optim, factor=1e6, nonfinite=nonfinite)
    before = weights_of(training)
    result = training.step([make("language-model", 1)], 0.01)
    assert result.figures[3] > 0
    assert result.figures[0].isfinite()
    assert scale_of(training) == (FIRST_SCALE / 2, 0)
    assert all(torch.equal(old, new) for old, new in zip(before, weights_of(training), strict=True))
    assert training.non_finite_tensors() == []


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: optim.name)
def test_a_step_without_an_overflow_is_that_of_float32(optim: OptimConfig) -> None:
    """The scale is a power of two: where nothing overflows and nothing is rounded to 0 it leaves no trace."""
    half, single = engine(optim), engine(optim, autocast=None)
    for seed in range(3):
        # dropout is 0.1: the same in both
        torch.manual_seed(seed)
        actual = half.step([make("language-model", seed)], 0.01)
        torch.manual_seed(seed)
        expected = single.step([make("language-model", seed)], 0.01)
        assert actual.figures[3] == 0
        torch.testing.assert_close(actual.figures[:3], expected.figures[:3], rtol=5e-3, atol=1e-3)
    assert scale_of(half) == (FIRST_SCALE, 3)


def test_clipping_sees_the_gradient_of_the_loss_itself() -> None:
    norm, clip = 0.0, 1e-3
    for autocast in (torch.float16, None):
        training = engine(AdagradConfig(max_grad_norm=clip), autocast=autocast)
        clipped: list[Tensor] = []
        step = training.optimizer.step

        def look(
            step: Callable[..., Any] = step, training: TrainingEngine = training, clipped: list[Tensor] = clipped
        ) -> Any:
            clipped.append(
                torch.stack([weight.grad.norm() for weight in training.weights if weight.grad is not None]).norm()
            )
            return step()

        training.optimizer.step = look  # type: ignore[method-assign]
        torch.manual_seed(0)
        result = training.step([make("language-model", 1)], 0.01)
        assert clipped[0].item() == pytest.approx(clip, rel=1e-4)
        norm = norm or result.figures[2].item()
        assert result.figures[2].item() == pytest.approx(norm, rel=1e-2)


def test_a_gradient_below_the_range_of_float16_is_not_lost() -> None:
    """1e-6 of the loss over 1e3 targets: without the scale all gradients that pass through products are 0."""
    batch = make("language-model", 1)

    def gradients(training: TrainingEngine) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        clip = training._update_weights

        def look(norm: Tensor | None, learning_rate: float) -> None:
            named = training.model.named_parameters()
            seen.update({name: weight.grad.clone() for name, weight in named if weight.grad is not None})
            clip(norm, learning_rate)

        training._update_weights = look  # type: ignore[method-assign]
        torch.manual_seed(0)
        training.step([batch], 0.01)
        return seen

    name, factor = "body.0.ff.inner.up.weight", 1e-7
    expected = gradients(engine(AdamWConfig(), autocast=None, factor=factor))[name]
    unscaled = engine(AdamWConfig(), factor=factor)
    unscaled.loss_scaler = None
    assert not gradients(unscaled)[name].any()
    actual = gradients(engine(AdamWConfig(), factor=factor))[name]
    assert expected.abs().max() > 0
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=float(expected.abs().max()) / 50)


def losses_of(folder: Path) -> list[float]:
    return [row["loss"] for row in learned(folder) if "loss" in row]


def test_losses_stay_near_those_of_float32(tmp_path: Path) -> None:
    common: dict[str, Any] = {"limits": {"steps": 50}, "model": {"dim": 16, "depth": 2, "heads": 2, "dropout": 0.0}}
    for precision in ("float16", "float32"):
        go(a_run(tmp_path / precision, precision=precision, **common))
    half, single = losses_of(tmp_path / "float16"), losses_of(tmp_path / "float32")
    assert len(half) == len(single) == 50
    assert single[-1] < single[0] / 2
    assert max(abs(a - b) for a, b in zip(half, single, strict=True)) < 0.05 * single[0]


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The steps, by their numbers, whose loss is multiplied so that float16 overflows."""
    steps, backward, step = set[int](), TrainingEngine._backward, TrainingEngine.step
    number = [0]

    def counted(self: TrainingEngine, *arguments: Any) -> Any:
        number[0] += 1
        return step(self, *arguments)

    def multiplied(self: TrainingEngine, *arguments: Any) -> Any:
        if number[0] not in steps:
            return backward(self, *arguments)
        loss = self.model.loss
        self.model.loss = lambda *a, **b: (r := loss(*a, **b))._replace(total=r.total * 1e8)  # type: ignore[method-assign]
        try:
            return backward(self, *arguments)
        finally:
            self.model.loss = loss  # type: ignore[method-assign]

    monkeypatch.setattr(TrainingEngine, "step", counted)
    monkeypatch.setattr(TrainingEngine, "_backward", multiplied)
    yield steps
    number[0] = 0


def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(tmp_path: Path, overflowing: set[int]) -> None:
    overflowing.update({2, 3, 7})
    go(a_run(tmp_path / "whole", precision="float16"))
    overflowing.clear()
    overflowing.update({14, 15, 19})
    # steps are counted on: the second run's are 13 to 24
    stopped(a_run(tmp_path / "halves", precision="float16"), 6)
    go(a_run(tmp_path / "halves", precision="float16"))
    whole, halves = learned(tmp_path / "whole"), learned(tmp_path / "halves")
    for row in (*whole, *halves):
        for name in ("seconds", "tokens_per_second"):
            row.pop(name, None)
    assert halves == whole
    assert [row["loss"] for row in whole if "loss" in row].count(None) == 3
    last = "checkpoints/step-00000012/state.json"
    whole_state, state = (json.loads((tmp_path / name / last).read_text()) for name in ("whole", "halves"))
    assert whole_state["loss_scale"] == state["loss_scale"] == [FIRST_SCALE / 8, 5]
    assert state["train_state"]["overflowed_steps"] == 3
    assert state["train_state"]["overflows_in_row"] == 0


def test_skipped_steps_are_told_once_and_counted(tmp_path: Path, overflowing: set[int]) -> None:
    overflowing.update({2, 3, 7})
    heard = Heard()
    go(a_run(tmp_path / "run", precision="float16"), heard)
    assert heard.notes.count("was skipped: its numbers overflowed float16; the scale of the loss is halved") == 1
    assert "step 2 was skipped" in heard.notes
    assert "3 of 12 steps were skipped: they overflowed float16; the loss is now scaled by 8,192" in heard.notes


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_overflows_without_end_end_the_run(tmp_path: Path, overflowing: set[int], nonfinite: str) -> None:
    overflowing.update(range(3, 1000))
    settings = {"limits": {"steps": 100}, "optim": {"lr": 1e-2, "nonfinite": nonfinite}, "save": {"every": 2}}
    with pytest.raises(TrainingDiverged) as ended:
        go(a_run(tmp_path / "run", precision="float16", **settings))
    sentence = str(ended.value)
    assert sentence.startswith(
        "25 steps in a row overflow float16 at any scale of the loss, the last of them at step 27;"
    )
    assert MAX_OVERFLOWS_IN_ROW == 25
    assert sentence.endswith("set precision=bfloat16 or float32, or try a lower learning rate")


def _steps_of_a_process(rank: int, meeting: str, out: str) -> None:
    """Three steps of one of two processes, with each way to share the work."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    from manyformer.training.parallel_strategies import FSDPStrategy

    group = ProcessGroup(rank, 2, rank)
    strategies: dict[str, ParallelStrategy] = {"ddp": DDPStrategy(group), "fsdp": FSDPStrategy(group)}
    report = {name: _steps_with(strategy, rank) for name, strategy in strategies.items()}
    Path(out, f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def _steps_with(strategy: ParallelStrategy, rank: int) -> dict[str, Any]:
    """Three steps, of which the loss of the second one overflows in the first process alone."""
    torch.manual_seed(0)
    training, steps = engine(AdamWConfig(), strategy=strategy), []
    loss, factor = training.model.loss, 1.0

    def multiplied(*arguments: Any, **options: Any) -> BatchLoss:
        result = loss(*arguments, **options)
        return result._replace(total=result.total * factor)

    training.model.loss = multiplied  # type: ignore[method-assign]
    for number in range(3):
        factor = 1e8 if (number, rank) == (1, 0) else 1.0
        before = [whole(weight) for weight in training.weights]
        figures = training.step([make("language-model", number * 2 + rank)], 0.01).figures
        moved = any(not torch.equal(old, whole(new)) for old, new in zip(before, training.weights, strict=True))
        steps.append({"overflow": bool(figures[3] > 0), "moved": moved, "scale": scale_of(training).scale})
    weights = [whole(weight).double().sum().item() for weight in training.weights]
    return {"steps": steps, "weights": weights}


def whole(weight: Tensor) -> Tensor:
    return full_tensor(weight.detach()).clone()


def test_all_processes_skip_the_step_in_which_one_of_them_overflows(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "meeting"), str(tmp_path))
    workers = [processes.Process(target=_steps_of_a_process, args=(rank, *arguments)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        assert worker.exitcode == 0
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first.keys() == {"ddp", "fsdp"}
    for report in first.values():
        assert [step["scale"] for step in report["steps"]] == [FIRST_SCALE, FIRST_SCALE / 2, FIRST_SCALE / 2]
        assert [step["moved"] for step in report["steps"]] == [True, False, True]
        assert [step["overflow"] for step in report["steps"]] == [False, True, False]
    assert first == second


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.thinned(3)
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_recipe_learns_in_float16_what_it_learns_in_float32(recipe: str) -> None:
    """Losses, and the norm of the gradient under a scale: constants such as -1e9 and long sums have no place in it."""
    results = []
    for dtype in (None, torch.float16):
        model, generator = build_tiny(recipe, {}, 0).train(), torch.Generator().manual_seed(0)
        if not model.allows_autocast:
            pytest.skip("it acts and learns in float32")
        task = task_of(model)
        length = task.fixed_length(model) or min(48, model.max_length or 48)
        tokens = torch.randint(task.token_ids(model), (2, length), generator=generator)
        inputs = task.example(model, tokens)
        batch = task.batch(model, inputs, task.random_targets(model, inputs, generator))
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype or torch.float16, enabled=dtype is not None):
            loss = model.loss(batch)
        total = loss.total / loss.targets + loss.extra
        (1024 * total).backward()
        norms = [weight.grad.norm() for weight in model.parameters() if weight.grad is not None]
        results.append((total.item(), torch.stack(norms).norm().item() / 1024))
    assert results[1][0] == pytest.approx(results[0][0], rel=0.02)
    assert results[1][1] == pytest.approx(results[0][1], rel=0.1)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_loss_over_many_classes_has_the_gradients_of_float32(precision: str) -> None:
    """Gradients of the chunked loss are formed in its forward pass, where no scale reaches them: at equal logits of
    70,000 classes a float16 holds neither the sum of exponentials nor its inverse."""
    classes, options = 70_000, LossOptions(-100, 0.0, 4)
    generator = torch.Generator().manual_seed(0)
    features, targets = torch.randn(8, 16, generator=generator), torch.randint(classes, (8,), generator=generator)
    weight = 1e-3 * torch.randn(classes, 16, generator=generator)
    gradients = []
    for dtype in (torch.float32, getattr(torch, precision)):
        x, w = features.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            chunked_cross_entropy(x, w, None, targets, options).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert w.grad is not None
        gradients.append((x.grad, w.grad))
    tolerance = 0.02 if precision == "bfloat16" else 2e-3
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        assert float((actual - expected).norm() / expected.norm()) < tolerance


def test_a_model_that_must_have_float32_refuses_float16(tmp_path: Path) -> None:
    model = mf.build("transformer-lm", vocab=11, dim=16, depth=1, heads=2)
    model.allows_autocast = False
    with pytest.raises(UserError, match="precision is float16, but transformer-lm acts and learns in float32"):
        choose_autocast("float16", torch.device("cpu"), model)
