"""The example package with a recipe and a kernel of its own, installed beside manyformer and used by every command."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from installing import Process, install

PROJECT = Path(__file__).parents[2] / "examples/manyformer-stick-breaking"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """New processes in a folder with a text, which see the installed package."""
    folder = tmp_path_factory.mktemp("stick_breaking")
    install(PROJECT, folder / "site")
    (folder / "text.txt").write_text("the cat sat on the mat and the dog lay by the door; " * 200)
    process = Process(folder / "site", folder)
    yield process
    process.close()


@pytest.mark.slow
def test_its_own_tests_pass(process: Process) -> None:
    assert " passed" in process.pytest(str(PROJECT / "tests"))


@pytest.mark.slow
def test_every_command_finds_it_in_a_new_process(process: Process) -> None:
    (listed,) = json.loads(process.manyformer("list", "stick-breaking", "--json"))
    assert listed["module"] == "manyformer_stick_breaking.recipe"
    assert "EarlierTokens()" in process.manyformer(
        "show", "stick-breaking", "dim=32", "depth=1", "heads=2", "--pattern"
    )
    settings = ("dim=32", "depth=1", "heads=2", "data.path=text.txt", "data.tokenizer=char", "data.length=32")
    process.manyformer("train", "stick-breaking", *settings, "batch.tokens=256", "limits.steps=20", "device=cpu")
    folder = process.cwd / "runs/stick-breaking"
    (plugin,) = json.loads((folder / "env.json").read_text())["plugins"]
    assert plugin["name"] == "manyformer_stick_breaking.recipe"
    assert plugin["version"] == "0.1.0"
    assert process.manyformer("generate", str(folder), "the cat", "--max-new", "8").startswith("the cat")
    assert "perplexity" in process.manyformer("evaluate", str(folder))
    process.manyformer("check", str(folder), "--only", "cached,rewind,padding-left,packing,causal,saving,spec")


SUITE = """
title: Tiny
reference: transformer-lm
seeds: 1
run:
  model: {dim: 16, depth: 1, heads: 2, max_length: 16}
  data: {kind: synthetic, rule: markov, symbols: 6, length: 16, valid: 512}
  batch: {tokens: 256}
  limits: {steps: 2}
  evaluate: {every: null}
cases:
  transformer-lm: {}
  stick-breaking: {}
tasks:
  markov: {}
"""


def test_one_line_adds_the_recipe_to_a_suite(process: Process) -> None:
    (process.cwd / "suite.yaml").write_text(SUITE)
    process.manyformer("compare", "suite.yaml", "--out", "suite")
    table = (process.cwd / "suite/table.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table if line.startswith(("| transformer-lm", "| stick"))][:2] == [
        "| transformer-lm",
        "| stick-breaking",
    ]
    results = json.loads((process.cwd / "suite/results.json").read_text())
    assert results["missing"] == 0
