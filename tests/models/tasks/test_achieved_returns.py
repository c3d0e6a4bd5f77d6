"""Returns that a Decision Transformer achieves, and the graph and the maze that it learns from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import manyformer as mf
from manyformer.base.environments import make_environment, row_seeds
from manyformer.base.errors import UserError
from manyformer.cli.evaluate import wanted_returns
from manyformer.config import RunConfig, TextData, TrajectoriesData
from manyformer.data import open_data
from manyformer.inference.evaluate import evaluate
from manyformer.inference.evaluate.evaluate import score_model
from manyformer.models import DecisionTransformer
from manyformer.models.tasks import EvaluationSettings
from manyformer.models.tasks.trajectory_imitation import EVALUATION_SEED, achieved_returns


def model_for(name: str, **keywords: Any) -> DecisionTransformer:
    """A small model for an environment, with random weights."""
    environment: Any = make_environment(name, 1)
    torch.manual_seed(0)
    sizes = {"observations": environment.observations.size, "actions": environment.actions.size}
    model = mf.build("decision-transformer", **(sizes | {"dim": 8, "depth": 1, "window": 3} | keywords)).eval()
    assert isinstance(model, DecisionTransformer)
    return model


@torch.no_grad()
def test_the_wanted_return_shrinks_by_the_rewards_unless_they_are_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_for("graph-walk")
    asked: list[Tensor] = []
    observed = model.embed.observed

    def record(returns: Tensor, *rest: Tensor) -> list[Float[Tensor, "b l d"]]:
        asked.append(returns[0])
        return observed(returns, *rest)

    monkeypatch.setattr(model.embed, "observed", record)
    achieved_returns(model, "graph-walk", 5.0, 3, delayed=False)
    # after three steps the window is computed again
    assert [row.tolist() for row in asked[:5]] == [[5.0], [6.0], [7.0], [6.0, 7.0, 8.0], [7.0, 8.0, 9.0]]
    asked.clear()
    achieved_returns(model, "graph-walk", 5.0, 3, delayed=True)
    assert {value for row in asked for value in row.tolist()} == {5.0}


@torch.no_grad()
def test_returns_are_those_of_first_episodes_alone() -> None:
    model = model_for("stitch-maze")
    head: Any = model.head
    head.weight.zero_()
    head.bias.copy_(torch.tensor([0.0, 1.0]))
    assert achieved_returns(model, "stitch-maze", 1.0, 20, delayed=False).tolist() == [10.0] * 20
    head.bias.copy_(torch.tensor([1.0, 0.0]))
    environment = make_environment("stitch-maze", 20)
    starts = environment.reset(row_seeds(EVALUATION_SEED, 20)).argmax(1)
    assert (
        achieved_returns(model, "stitch-maze", 1.0, 20, delayed=False).tolist() == np.where(starts == 0, 1, 0).tolist()
    )


def test_environments_of_other_spaces_are_refused_in_a_sentence() -> None:
    model = model_for("graph-walk")
    for keywords, name, sentence in (
        ({}, "stitch-maze", "stitch-maze shows vectors of 8 numbers, and the model reads vectors of 20"),
        (
            {"actions": 3},
            "graph-walk",
            "graph-walk has 4 actions, and the model was built for 3; data.actions=4 is for",
        ),
        ({"continuous": True}, "graph-walk", "actions of graph-walk are discrete, those of the model continuous"),
        ({}, "grap-walk", "there is no environment 'grap-walk'"),
    ):
        model = model_for("graph-walk", **keywords)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=sentence):
            achieved_returns(model, name, 1.0, 2, delayed=False)


def test_generated_episodes_are_those_of_the_environment(tmp_path: Path) -> None:
    data = TrajectoriesData(path="generated:graph-walk", generated=50, length=5)
    opened = open_data(data, "windows", batch_tokens=50, cache=tmp_path, seed=0)
    assert opened.describe()[0].startswith("trajectories: generated:graph-walk; 50 episodes, ")
    assert opened.required_keywords["actions"] == 4
    assert opened.required_keywords["observations"] == 20
    with pytest.raises(UserError, match=r"generated:memory-length: there is no environment .* with a behaviour"):
        open_data(TrajectoriesData(path="generated:memory-length"), "windows", batch_tokens=50, cache=tmp_path, seed=0)


def test_an_environment_and_wanted_returns_need_each_other() -> None:
    for settings, sentence in (
        ({"environment": "graph-walk"}, "is needed: the returns to ask for"),
        ({"wanted": 3.0}, "is for playing in an environment"),
    ):
        with pytest.raises(ValueError, match=sentence):
            TrajectoriesData.model_validate({"path": "generated:graph-walk", **settings})


def test_a_run_is_trained_and_scored_for_every_wanted_return(tmp_path: Path) -> None:
    settings = [
        "data.generated=40",
        "data.episodes=10",
        "limits.steps=4",
        "schedule.warmup=1",
        "batch.tokens=40",
        "evaluate.every=null",
    ]
    mf.train("rl/graph-walks", [*settings, "save.every=4", f"out={tmp_path / 'run'}"])
    evaluation = evaluate(tmp_path / "run")
    names = [score.name for score in evaluation.scores]
    assert names == ["loss", "accuracy", *(f"return for {wanted}" for wanted in (-1, -2, -3, -5, -10))]
    assert all(-20 <= score.value <= -1 for score in evaluation.scores[2:])
    assert evaluation["return for -5"].parts["low"] <= evaluation["return for -5"].value
    settings_of = EvaluationSettings(wanted=(-4.0,))
    assert [score.name for score in evaluate(tmp_path / "run", settings=settings_of).scores[2:]] == ["return for -4"]
    with pytest.raises(UserError, match="stitch-maze shows vectors of 8 numbers"):
        evaluate(tmp_path / "run", settings=EvaluationSettings(environment="stitch-maze"))


def test_wanted_returns_of_a_command_are_numbers() -> None:
    assert wanted_returns("100,-2.5") == (100.0, -2.5)
    assert wanted_returns(None) == ()
    for text in ("", "a", "1,,2", "nan", "1e999"):
        with pytest.raises(UserError, match=r"--wanted \(.*\) must be numbers with commas between them"):
            wanted_returns(text)


def test_other_tasks_are_not_asked_for_returns() -> None:
    run = RunConfig(recipe="transformer-lm", data=TextData())
    with pytest.raises(UserError, match="are for models of trajectories; this is language modelling"):
        score_model(None, run, None, None, settings=EvaluationSettings(wanted=(1.0,)))  # type: ignore[arg-type]


@pytest.mark.slow
def test_shortest_paths_are_learned_from_random_walks(tmp_path: Path) -> None:
    """Asked for the length of the shortest path from each start, as in figure 2; cloning walks at random."""
    environment: Any = make_environment("graph-walk", 200)
    starts = environment.reset(row_seeds(EVALUATION_SEED, 200)).argmax(1)
    optimum = environment.optimal_returns()[starts - 1].astype(float)
    means = {}
    for returns in ("true", "false"):
        folder = tmp_path / returns
        mf.train("rl/graph-walks", [f"out={folder}", "evaluate.every=null", f"returns={returns}"])
        model = mf.load(folder)
        assert isinstance(model, DecisionTransformer)
        with torch.no_grad():
            means[returns] = achieved_returns(model, "graph-walk", optimum, 200, delayed=False).mean()
            for expected in (-3.0, -5.0, -10.0) if returns == "true" else ():
                achieved = achieved_returns(model, "graph-walk", expected, 200, delayed=False).mean()
                assert achieved == pytest.approx(expected, abs=0.6)
    assert means["true"] >= optimum.mean() - 0.3
    assert means["false"] < -8
