"""The moving average of weights against a plain loop, in evaluations, in checkpoints, and in the final model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import a_run, make
from runs import Heard, go, learned, stopped
from safetensors.torch import load_file

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import AdamWConfig, EmaConfig
from manyformer.models import Model
from manyformer.training.engine import TrainingEngine
from manyformer.training.process_group import DDPStrategy

SETTINGS: dict[str, Any] = {
    "ema": {"beta": 0.9},
    "limits": {"steps": 11},
    "evaluate": {"every": 3},
    "save": {"every": 4},
    "batch": {"accumulate": 2},
}


def averaging(config: EmaConfig) -> tuple[TrainingEngine, Model]:
    torch.manual_seed(3)
    model = mf.build("transformer-lm", vocab=11, dim=8, depth=1, heads=1)
    return TrainingEngine(model, AdamWConfig(lr=0.1), DDPStrategy(), ema=config), model


@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_equals_a_plain_loop(warmup: bool) -> None:
    engine, model = averaging(EmaConfig(beta=0.4, warmup=warmup))
    assert engine.average is not None
    expected = {name: weight.detach().double().clone() for name, weight in model.named_parameters()}
    for step in range(1, 8):
        engine.step([make("language-model", step)], 0.05)
        engine.average.update(step)
        # (1 + 5) / (10 + 5) is 0.4: the warm-up ends within the loop
        beta = min(0.4, (1 + step) / (10 + step)) if warmup else 0.4
        for name, weight in model.named_parameters():
            expected[name] = beta * expected[name] + (1 - beta) * weight.detach().double()
    averages = engine.average.named_tensors()
    # a tied weight has one average
    assert averages.keys() == {f"{name}/ema" for name in expected}
    for name, value in expected.items():
        assert averages[f"{name}/ema"].dtype is torch.float32
        torch.testing.assert_close(averages[f"{name}/ema"].double(), value, atol=1e-6, rtol=1e-6)


def test_beta_0_is_the_model() -> None:
    engine, model = averaging(EmaConfig(beta=0.0))
    assert engine.average is not None
    engine.step([make("language-model", 1)], 0.05)
    engine.average.update(1)
    averages = engine.average.named_tensors()
    assert all(torch.equal(averages[f"{name}/ema"], weight) for name, weight in model.named_parameters())


def test_weights_come_back_after_an_evaluation_that_fails() -> None:
    engine, model = averaging(EmaConfig(beta=0.9))
    engine.step([make("language-model", 1)], 0.05)
    weights = [weight.detach().clone() for weight in model.parameters()]

    def fail() -> None:
        with engine.scored_weights():
            assert not torch.equal(model.embed.token.weight, weights[0])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(torch.equal(one, two) for one, two in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize("step", [4, 7])
def test_an_interrupted_run_has_the_same_average_to_the_last_bit(step: int, tmp_path: Path) -> None:
    go(a_run(tmp_path / "whole", **SETTINGS))
    run = a_run(tmp_path / "run", **SETTINGS)
    stopped(run, step)
    result = go(run)
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")
    last = "checkpoints/step-00000011/ema.safetensors"
    for file in (last, "model/model.safetensors"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    # the scores are those of the averages, which the final model has
    assert result.chosen_weights.startswith("the moving averages of")
    chosen = int(result.chosen_weights.rstrip(", thebs").rpartition(" ")[2])
    averages = load_file(tmp_path / f"run/checkpoints/step-{chosen:08d}/ema.safetensors")
    final = load_file(tmp_path / "run/model/model.safetensors")
    assert all(torch.equal(final[name.removesuffix("/ema")], value) for name, value in averages.items())


def test_an_average_that_is_not_evaluated_is_taken_if_it_is_better(tmp_path: Path) -> None:
    # a rate far too high: the average of the last steps is better than any of them
    settings = {**SETTINGS, "evaluate": {"every": None}, "ema": {"beta": 0.9, "evaluate": False}}
    plain = go(a_run(tmp_path / "plain", **{**settings, "ema": {}}, optim={"lr": 0.05}))
    result = go(a_run(tmp_path / "run", **settings, optim={"lr": 0.05}))
    assert [row for row in learned(tmp_path / "run") if "loss" in row] == [
        row for row in learned(tmp_path / "plain") if "loss" in row
    ]
    name = "the moving average of step 11"
    if result.scores["loss"] < plain.scores["loss"]:
        assert result.chosen_weights.startswith(f"{name}, better than those of the last step")
    else:
        assert f"{name} is not better" in result.chosen_weights


def test_a_branch_begins_its_average_and_says_so(tmp_path: Path) -> None:
    go(a_run(tmp_path / "plain"))
    heard = Heard()
    branch = {"branch_from": str(tmp_path / "plain"), "limits": {"steps": 14}}
    go(a_run(tmp_path / "averaged", ema={"beta": 0.9}, **branch), heard)
    assert "the moving average of the weights begins here: the checkpoint has none" in heard.notes


def test_impossible_averages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be 0 with ema\.beta"):
        a_run(tmp_path, ema={"beta": 0.9}, save={"average_last": 2})
    with pytest.raises(ValueError, match=r"needs ema\.beta"):
        a_run(tmp_path, ema={"evaluate": False})
    data = [torch.randint(0, 9, (2, 8)) for _ in range(2)]
    with pytest.raises(UserError, match="give eval_data="):
        mf.train("transformer-lm", {"ema.beta": 0.9, "ema.evaluate": False, "out": str(tmp_path)}, data=data)


def test_the_batch_grows_and_the_data_keeps_its_order(tmp_path: Path) -> None:
    batch = {"accumulate": 4, "start": 1, "warmup_steps": 6}
    go(a_run(tmp_path / "whole", batch=batch, limits={"steps": 9}))
    rows = [row["tokens"] for row in learned(tmp_path / "whole") if "loss" in row]
    # 32 tokens a pass
    passes = [(now - before) // 32 for before, now in zip([0, *rows], rows)]
    assert passes == [1, 1, 2, 2, 3, 3, 4, 4, 4]
    run = a_run(tmp_path / "run", batch=batch, limits={"steps": 9})
    stopped(run, 5)
    go(run)
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")
    by_tokens = a_run(tmp_path / "t", batch={"accumulate": 4, "start": 1, "warmup_tokens": 96}, limits={"steps": 4})
    go(by_tokens)
    assert [row["tokens"] for row in learned(tmp_path / "t") if "loss" in row] == [32, 96, 224, 352]


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"accumulate": 4, "start": 4, "warmup_steps": 5}, "cannot grow to batch.accumulate 4"),
        ({"accumulate": 4, "start": 1}, "needs batch.warmup_steps or batch.warmup_tokens"),
        ({"accumulate": 4, "start": 1, "warmup_steps": 5, "warmup_tokens": 5}, "one of the two"),
        ({"warmup_steps": 5}, "needs batch.start"),
    ],
)
def test_a_batch_that_cannot_grow_is_refused(batch: dict[str, int], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        a_run(tmp_path, batch=batch)
