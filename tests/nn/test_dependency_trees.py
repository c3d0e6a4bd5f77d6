"""Dependency trees: every word's numbers against networkx, and trees that are none."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyformer.nn.structures import ROOT, preorder_columns


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Heads of a random forest whose words stand in any order: each hangs on one drawn before it, or on the root."""
    order = draw(st.permutations(range(1, draw(st.integers(1, 12)) + 1)))
    heads = [ROOT] * len(order)
    for place, word in enumerate(order[1:], 1):
        heads[word - 1] = draw(st.sampled_from([*order[:place], ROOT]))
    return heads


def drawn(heads: list[int]) -> nx.DiGraph:
    """The tree from head to dependant, the virtual root included."""
    graph = nx.DiGraph((head, word) for word, head in enumerate(heads, 1))
    assert nx.is_arborescence(graph)
    return graph


@given(trees())
@settings(max_examples=200, deadline=None)
def test_depths_and_spans_are_those_of_networkx(heads: list[int]) -> None:
    graph, actual = drawn(heads), preorder_columns(heads)
    lengths = nx.single_source_shortest_path_length(graph, ROOT)
    single = heads.count(ROOT) == 1
    assert actual[:, 0].tolist() == [lengths[word] - single for word in range(1, len(heads) + 1)]
    assert sorted(actual[:, 1]) == list(range(len(heads)))
    for word in range(1, len(heads) + 1):
        _, first, last = actual[word - 1]
        below = {other for other in range(1, len(heads) + 1) if first <= actual[other - 1, 1] <= last}
        assert below == nx.descendants(graph, word) | {word}


def test_a_sentence_by_hand() -> None:
    # She(2) reads(0) old(4) books(2)
    assert preorder_columns([2, 0, 4, 2]).tolist() == [[1, 1, 1], [0, 0, 3], [2, 3, 3], [1, 2, 3]]


def test_several_roots_are_not_one_node() -> None:
    assert preorder_columns([0, 0, 2]).tolist() == [[1, 0, 0], [1, 1, 2], [2, 2, 2]]


def test_no_words_are_no_tree() -> None:
    assert np.array_equal(preorder_columns([]), np.zeros((0, 3), dtype=int))


def test_a_long_chain_needs_no_deep_recursion() -> None:
    actual = preorder_columns(list(range(20_000)))
    np.testing.assert_array_equal(actual[:, 0], np.arange(20_000))


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([0, 3], "word 2 has the head 3, which does not exist: there are 2 words"),
        ([0, -1], "word 2 has the head -1, which does not exist"),
        ([0, 2, 1], "word 2 is its own head"),
        ([0, 3, 4, 2, 2], r"the heads of the words 2, 3, 4 form a cycle that does not reach the root"),
        ([2, 1], "the heads of the words 1, 2 form a cycle"),
        ([0, 4, 4, 3], "the heads of the words 4, 3 form a cycle"),
    ],
)
def test_what_is_no_tree_is_refused(heads: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preorder_columns(heads)
