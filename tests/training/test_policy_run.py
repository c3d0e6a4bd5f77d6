"""A policy is trained, stopped, resumed and scored like every other model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Heard, go, learned, stopped

from manyformer.base.errors import UserError, UserErrors
from manyformer.config import RunConfig
from manyformer.inference.evaluate import evaluate
from manyformer.training import train
from manyformer.training.build_model import open_run_data
from manyformer.training.events import TrainingProgress
from manyformer.training.run_folder import as_training_run

SETTINGS = [
    *("model.dim=8", "model.depth=1", "model.heads=2", "model.memory_length=6", "data.options={length: 4}"),
    *("data.rows=6", "data.steps=7", "data.passes=2", "data.valid=20", "batch.tokens=30", "optim.lr=0.01"),
    *("limits.steps=11", "evaluate.every=4", "save.every=3", "save.keep_last=2", "log.every=1", "device=cpu"),
]


def policy_run(out: Path, *settings: str) -> RunConfig:
    return as_training_run("gtrxl", [*SETTINGS, f"out={out}", *settings])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policy") / "whole"
    go(policy_run(out), opened=open_run_data)
    return out


def test_metrics_and_progress_have_returns(whole: Path, tmp_path: Path) -> None:
    rows = learned(whole)
    trained = [row for row in rows if "loss" in row]
    assert all(-1 <= row["return"] <= 1 and row["episode_length"] == 5 for row in trained)
    assert all(row["success"] == pytest.approx((row["return"] + 1) / 2) for row in trained)
    assert any("valid_return" in row for row in rows)
    heard = Heard()
    go(policy_run(tmp_path / "short", "limits.steps=2"), heard, opened=open_run_data)
    progress = [event for event in heard if isinstance(event, TrainingProgress)]
    assert progress[0].scores.keys() == {"return", "episode_length", "success"}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("steps", [(1, 6), (4, 8), (3, 10)])
def test_an_interruption_changes_nothing(steps: tuple[int, ...], tmp_path: Path, whole: Path) -> None:
    run = policy_run(tmp_path / "run")
    for step in steps:
        stopped(run, step, opened=open_run_data)
    go(run, opened=open_run_data)
    assert learned(tmp_path / "run") == learned(whole)
    for name in ("model/model.safetensors", "checkpoints/step-00000011/rollout.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes(), name


GYMNASIUM_SETTINGS = ["data.options={}", "data.rows=3", "data.valid=2", "evaluate.every=null", "limits.steps=5"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_environments_of_gymnasium_are_resumed_in_the_middle_of_episodes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    settings = [f"data.environment={name}", *GYMNASIUM_SETTINGS]
    go(policy_run(tmp_path / "whole", *settings), opened=open_run_data)
    run = policy_run(tmp_path / "run", *settings)
    stopped(run, 3, opened=open_run_data)
    go(run, opened=open_run_data)
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")
    weights = [(tmp_path / out / "model/model.safetensors").read_bytes() for out in ("run", "whole")]
    assert weights[0] == weights[1]


def test_a_policy_learns_from_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium = pytest.importorskip("gymnasium")

    class Lights(gymnasium.Env):  # type: ignore[misc]
        """A bright or a dark image, and the action that names it."""

        observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.bright, self.steps = int(self.np_random.integers(2)), 0
            return np.full((36, 36, 1), 200 * self.bright, np.uint8), {}

        def step(self, action: int) -> Any:
            self.steps += 1
            return (
                np.full((36, 36, 1), 200 * self.bright, np.uint8),
                float(action == self.bright),
                self.steps == 3,
                False,
                {},
            )

    gymnasium.register("Lights-v0", Lights)
    settings = ["data.environment=Lights-v0", *GYMNASIUM_SETTINGS, "limits.steps=2"]
    result = go(policy_run(tmp_path / "run", *settings), opened=open_run_data)
    assert result.load().spec.keywords["observations"] == "36x36x1"
    assert 0 <= result.scores["return"] <= 3


def test_a_trained_policy_is_scored_by_episodes(whole: Path) -> None:
    evaluation = evaluate(whole, device="cpu")
    assert [score.name for score in evaluation.scores] == ["return", "success", "episode length"]
    assert evaluation.how == "20 episodes of the likeliest actions"
    assert evaluation["return"].value == pytest.approx(evaluation["success"].value / 50 - 1)
    assert evaluation["return"].parts["low"] <= evaluation["return"].value <= evaluation["return"].parts["high"]
    assert evaluation["episode length"].value == 5
    valid = evaluate(whole, split="valid", device="cpu")
    scores = json.loads((whole / "result.json").read_text())["scores"]
    assert valid["return"].value == pytest.approx(scores["return"])
    with pytest.raises(UserError, match=r"x\.txt: a policy is scored by the episodes that it plays"):
        evaluate(whole, data="x.txt", device="cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.environment=memory-lenght"], r"no environment 'memory-lenght'; did you mean memory-length\?"),
        (["model.actions=3"], "model.actions is 3, but the data makes it 2; leave it out"),
        (["data.steps=31"], "batch.tokens is 30, less than the 31 steps of one row"),
        (["loss.label_smoothing=0.1"], "label_smoothing"),
        (["precision=bfloat16"], "precision is bfloat16, but gtrxl acts and learns in float32"),
    ],
)
def test_mistakes_are_named(settings: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(policy_run(tmp_path / "run", *settings), on_event=Heard())


def test_a_policy_is_ranked_by_its_return() -> None:
    assert as_training_run("gtrxl").evaluate.metric == "return"
    assert as_training_run("transformer-lm").evaluate.metric == "loss"
    with pytest.raises(UserErrors, match=r"gtrxl \(policy\) is ranked by return, not by 'loss'"):
        as_training_run("gtrxl", ["evaluate.metric=loss"])


def test_an_environment_that_fails_leaves_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    from gymnasium.envs.classic_control import CartPoleEnv

    class Spoiled(CartPoleEnv):
        count = 0

        def step(self, action: Any) -> Any:
            Spoiled.count += 1
            observation, reward, *rest = super().step(action)
            return observation, float("nan") if Spoiled.count > 100 else reward, *rest

    gymnasium.register("Spoiled-v0", Spoiled)
    run = policy_run(
        tmp_path / "run", "data.environment=Spoiled-v0", "data.options={}", "data.valid=1", "evaluate.every=null"
    )
    with pytest.raises(UserError, match="the environment Spoiled-v0 gave the reward nan at step"):
        go(run, opened=open_run_data)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
