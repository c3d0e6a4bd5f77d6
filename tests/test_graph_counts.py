"""The kept counts of compiled graphs are of our recipes, are explained, and can be counted again."""

import subprocess
import sys
from pathlib import Path

import pytest

import manyformer as mf
from manyformer.config.graph_counts import GraphCount, counted_graphs

ROOT = Path(__file__).parents[1]
OF_ONE_GRAPH = ["llama", "retnet"]


def test_counts_are_of_recipes_and_several_graphs_have_reasons() -> None:
    counts = counted_graphs()
    assert counts.keys() <= mf.recipes().keys()
    for name, count in counts.items():
        assert (count.graphs > 1) == bool(count.ends), name


def test_the_sentence_of_a_count_says_what_graphs_end_at() -> None:
    assert GraphCount(1, (), 0).sentence() == "1 graph; none is added for other lengths"
    found = GraphCount(3, ("reach: tolist",), 2).sentence()
    assert found == "3 graphs, as they end at reach: tolist; 2 more for two other lengths"


def test_language_models_of_full_attention_and_of_chunks_are_one_graph_of_any_length() -> None:
    counts = counted_graphs()
    for name in ["transformer-lm", "llama", "transformer-xl", "retnet", "gla", "mamba-2", "gated-deltanet"]:
        assert counts[name] == GraphCount(1, (), 0), name


@pytest.mark.slow
@pytest.mark.parametrize("recipe", OF_ONE_GRAPH)
def test_a_recipe_has_as_many_graphs_as_are_kept(recipe: str) -> None:
    """In a process of its own, where shapes are not checked: that cannot be traced."""
    command = [sys.executable, str(ROOT / "benchmarks" / "graph_counts.py"), recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.startswith(f"{recipe}: 1 graph; none is added")
