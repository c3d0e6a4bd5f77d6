"""The example package with a task, a model and a kind of data of its own, used by every command."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from installing import Process, install

PROJECT = Path(__file__).parents[2] / "examples/manyformer-text-regression"
SETTINGS = ("data.path=numbers.tsv", "dim=16", "heads=2", "batch.tokens=512", "limits.steps=60", "device=cpu")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """New processes in a folder with numbered texts, which see the installed package."""
    folder = tmp_path_factory.mktemp("text_regression")
    install(PROJECT, folder / "site")
    texts = [f"{'a' * (row % 7)}{'b' * (row * 5 % 11)}" for row in range(200)]
    (folder / "numbers.tsv").write_text("".join(f"{text}\t{text.count('a') / 10}\n" for text in texts))
    process = Process(folder / "site", folder)
    yield process
    process.close()


def test_a_task_of_ones_own_is_listed_trained_and_scored(process: Process) -> None:
    (listed,) = json.loads(process.manyformer("list", "--task", "text-regression", "--json"))
    assert listed["name"] == "text-regression"
    process.manyformer("train", "text-regression", *SETTINGS, "depth=1", "evaluate.metric=mae")
    folder = process.cwd / "runs/text-regression"
    assert "mae" in (folder / "metrics.jsonl").read_text()
    names = {plugin["name"] for plugin in json.loads((folder / "env.json").read_text())["plugins"]}
    assert names >= {"manyformer_text_regression.recipe", "manyformer_text_regression.data"}
    assert "kind: numbers" in (folder / "run.yaml").read_text()
    (score,) = json.loads(process.manyformer("evaluate", str(folder), "--json"))["scores"]
    assert score["name"] == "rmse"
    assert score["value"] < 0.2, "the standard deviation of the numbers: what a model knows that predicts their mean"
    (of_file,) = json.loads(process.manyformer("evaluate", str(folder), "--data", "numbers.tsv", "--json"))["scores"]
    assert of_file["signature"] == "root mean squared error:200"


@pytest.mark.slow
def test_its_score_is_compared(process: Process) -> None:
    settings = "recipe: text-regression\n  data: {kind: numbers, path: numbers.tsv}\n  device: cpu\n"
    cases = "cases:\n  one: {model: {depth: 1}}\n  two: {model: {depth: 2}}\n"
    (process.cwd / "depths.yaml").write_text(
        f"title: Depth\nrun:\n  {settings}  batch: {{tokens: 512}}\n  limits: {{steps: 10}}\n"
        f"  model: {{dim: 16, heads: 2}}\nscore: [rmse]\nseeds: 1\n{cases}"
    )
    table = process.manyformer("compare", "depths.yaml", "--out", "compared")
    assert "rmse" in table


@pytest.mark.slow
def test_every_encoder_has_its_head(process: Process) -> None:
    process.manyformer("train", "fnet", "data.kind=numbers", *SETTINGS[:2], "depth=1", *SETTINGS[3:], "out=runs/fnet")
    folder = process.cwd / "runs/fnet"
    (score,) = json.loads(process.manyformer("evaluate", str(folder), "--json"))["scores"]
    assert score["name"] == "rmse"
    assert score["value"] < 0.2
