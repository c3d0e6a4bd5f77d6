"""Structural positions: offsets against networkx, chains against Shaw's distances, and a task that needs the tree."""

from collections.abc import Sequence

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyformer.models import ClassHead, Tagger, TokenEmbedding
from manyformer.nn import Attention, KernelCall, SoftmaxKernel
from manyformer.nn.batches import IGNORE_INDEX, TaggingBatch
from manyformer.nn.core import Context, ContiguousLayout, DependencyTree, TokenPositions
from manyformer.nn.positions import (
    ComposedPosition,
    FusedTreePosition,
    Position,
    ShawPosition,
    SinusoidalPosition,
    TreeOffsetPosition,
)
from manyformer.nn.positions.relative import tree_offsets
from manyformer.nn.structures import NO_NODE, ROOT, preorder_columns
from manyformer.recipes.parts.baselines import stack


def place_of(heads: Sequence[int], *, outside: int = 0) -> TokenPositions:
    """One sentence in a row, after so many tokens in no tree."""
    numbers = torch.cat([torch.full((outside, 3), NO_NODE), torch.from_numpy(preorder_columns(heads))])[None]
    pos = torch.arange(numbers.shape[1])[None]
    return TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout(), DependencyTree(*numbers.unbind(-1)))


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Heads of a random tree, or of several, whose words stand in any order."""
    order = draw(st.permutations(range(1, draw(st.integers(1, 9)) + 1)))
    heads = [ROOT] * len(order)
    for index, word in enumerate(order[1:], 1):
        heads[word - 1] = draw(st.sampled_from([*order[:index], ROOT]))
    return heads


def by_the_paper(graph: nx.DiGraph, depth: dict[int, int], i: int, j: int) -> int:
    """The relative structural position of word i to word j, as the paper has it, with f the sign of i - j."""
    if i == j or i in nx.descendants(graph, j) or j in nx.descendants(graph, i):
        return depth[i] - depth[j]
    return (1 if i > j else -1) * (depth[i] + depth[j])


@given(trees())
@settings(max_examples=100, deadline=None)
def test_offsets_are_the_papers(heads: list[int]) -> None:
    graph = nx.DiGraph((head, word) for word, head in enumerate(heads, 1))
    lengths = nx.single_source_shortest_path_length(graph, ROOT)
    depth = {word: length - (heads.count(ROOT) == 1) for word, length in lengths.items()}
    place = place_of(heads)
    actual = tree_offsets(place, place)[0]
    assert torch.equal(actual, -actual.T)
    for query in range(1, len(heads) + 1):
        for key in range(1, len(heads) + 1):
            # as Shaw's distances they are those of the key as seen from the query
            assert actual[query - 1, key - 1] == by_the_paper(graph, depth, key, query)


def test_a_sentence_by_hand() -> None:
    # Bush(2) nominated(0) two(4) men(2) today(2)
    place = place_of([2, 0, 4, 2, 2])
    assert tree_offsets(place, place)[0].tolist() == [
        [0, -1, 3, 2, 2],
        [1, 0, 2, 1, 1],
        [-3, -2, 0, -1, 3],
        [-2, -1, 1, 0, 2],
        [-2, -1, -3, -2, 0],
    ]


def test_pieces_of_a_word_are_one_node() -> None:
    numbers = torch.from_numpy(preorder_columns([2, 0, 2])).repeat_interleave(torch.tensor([1, 3, 2]), 0)[None]
    place = TokenPositions(
        torch.arange(6)[None], torch.zeros(1, 6).long(), ContiguousLayout(), DependencyTree(*numbers.unbind(-1))
    )
    words = tree_offsets(place_of([2, 0, 2]), place_of([2, 0, 2]))[0]
    word = torch.tensor([0, 1, 1, 1, 2, 2])
    assert torch.equal(tree_offsets(place, place)[0], words[word][:, word])


def shaw_as_structural(shaw: ShawPosition) -> TreeOffsetPosition:
    """Structural tables with the rows of Shaw's."""
    actual = TreeOffsetPosition(shaw.keys.shape[-1], shaw.clip)
    with torch.no_grad():
        actual.keys[:-1], actual.values[:-1] = shaw.keys, shaw.values
    return actual


def attended(position: Position, x: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
    """What attention gives and the gradient of its input."""
    torch.manual_seed(1)
    layer = Attention(x.shape[-1], 2, SoftmaxKernel(), position=position).double()
    x = x.detach().requires_grad_()
    y = layer(x, Context(positions)).y
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    return y, grad


def test_in_a_chain_it_is_shaw() -> None:
    x, place = torch.randn(1, 12, 16).double(), place_of(range(12))
    shaw = ShawPosition(8, 4)
    expected = attended(shaw, x, place)
    torch.testing.assert_close(attended(shaw_as_structural(shaw), x, place), expected, atol=1e-10, rtol=0)


def test_both_together_are_the_sum_of_their_tables() -> None:
    """In a chain the two offsets agree, so that one table with the sums of their rows does the same."""
    x, place = torch.randn(1, 12, 16).double(), place_of(range(12))
    one, two = ShawPosition(8, 4), ShawPosition(8, 4)
    summed = ShawPosition(8, 4)
    with torch.no_grad():
        summed.keys[:], summed.values[:] = one.keys + two.keys, one.values + two.values
    actual = attended(ComposedPosition(one, shaw_as_structural(two)), x, place)
    torch.testing.assert_close(actual, attended(summed, x, place), atol=1e-6, rtol=0)


def by_pairs(position: TreeOffsetPosition, q: Tensor, k: Tensor, v: Tensor, positions: TokenPositions) -> Tensor:
    """Attention with a vector for each pair of words, written with loops."""
    actual, tree = torch.zeros_like(v), positions.tree
    assert tree is not None
    for b, h, i in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        rows = []
        for j in range(k.shape[2]):
            near = int(tree_offsets(positions, positions)[b, i, j].clamp(-position.clip, position.clip)) + position.clip
            outside = min(tree.depth[b, i], tree.depth[b, j]) < 0
            rows.append(2 * position.clip + 1 if outside else near)
        scores = [q[b, h, i] @ (k[b, h, j] + position.keys[row]) / q.shape[-1] ** 0.5 for j, row in enumerate(rows)]
        weights = torch.stack(scores).softmax(0)
        actual[b, h, i] = sum(weights[j] * (v[b, h, j] + position.values[row]) for j, row in enumerate(rows))
    return actual


def test_it_adds_a_vector_for_each_pair_to_keys_and_values() -> None:
    torch.manual_seed(3)
    position = TreeOffsetPosition(4, 2).double()
    q, k, v = torch.randn(3, 1, 2, 9, 4).double().unbind()
    place = place_of([2, 0, 4, 2, 2, 5, 6, 7], outside=1)
    actual = SoftmaxKernel()(KernelCall(q, k, v, place, place, position)).y
    torch.testing.assert_close(actual, by_pairs(position, q, k, v, place), atol=1e-10, rtol=0)


def test_tokens_in_no_tree_have_a_row_of_their_own() -> None:
    place = place_of([0, 1], outside=1)
    actual = TreeOffsetPosition(4, 2).row_index(place, place)[0]
    assert actual.tolist() == [[5, 5, 5], [5, 2, 3], [5, 1, 2]]


def test_fused_positions_are_the_formula() -> None:
    place, fused = place_of([2, 0, 2], outside=1), FusedTreePosition(8)
    order, depth = (SinusoidalPosition(8).rows(torch.arange(n + 1)) for n in (3, 1))
    nowhere = torch.stack([-depth[1, 0::2], depth[1, 1::2]], -1).flatten()
    depths = torch.stack([nowhere, depth[1], depth[0], depth[1]])
    expected = torch.tanh(order @ fused.sequential.weight.T + depths @ fused.structural.weight.T)
    torch.testing.assert_close(fused.embed(torch.ones(1, 4, 8), place)[0], 1 + expected)


def test_without_a_tree_there_are_no_structural_positions() -> None:
    place = place_of([0, 1])._replace(tree=None)
    for use in (
        lambda: FusedTreePosition(4).embed(torch.zeros(1, 2, 4), place),
        lambda: tree_offsets(place, place_of([0, 1])),
    ):
        with pytest.raises(ValueError, match="structural positions need the tree of every sentence: pass `trees`"):
            use()
    with pytest.raises(ValueError, match=r"TreeOffsetPosition: clip \(0\) must be at least 1 edge"):
        TreeOffsetPosition(4, 0)


def parents(generator: torch.Generator, rows: int, words: int, symbols: int) -> TaggingBatch:
    """Random trees in random order of their words; the label of a word is the token of its parent."""
    tokens = torch.randint(symbols, (rows, words), generator=generator)
    trees, targets = torch.empty(rows, words, 3, dtype=torch.long), torch.full((rows, words), IGNORE_INDEX)
    for row in range(rows):
        order = (torch.randperm(words, generator=generator) + 1).tolist()
        heads = [ROOT] * words
        for place, word in enumerate(order[1:], 1):
            heads[word - 1] = order[int(torch.randint(place, (), generator=generator))]
            targets[row, word - 1] = tokens[row, heads[word - 1] - 1]
        trees[row] = torch.from_numpy(preorder_columns(heads))
    return TaggingBatch(tokens, targets, None, trees)


def accuracy_on_parents(position: Position, steps: int = 150) -> float:
    """Accuracy of one layer of attention on trees it has not seen."""
    torch.manual_seed(0)
    generator, dim, symbols = torch.Generator().manual_seed(0), 64, 10
    body = stack(
        1, lambda _: {"attention": Attention(dim, 4, SoftmaxKernel(), position=position)}, order="pre",
        norm=lambda: nn.LayerNorm(dim), dropout=0.0,
    )  # fmt: skip
    model = Tagger(TokenEmbedding(symbols, dim, scale=dim**0.5), body, ClassHead(dim, symbols))
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        loss = model.loss(parents(generator, 32, 12, symbols))
        optimiser.zero_grad()
        (loss.total / loss.targets).backward()
        optimiser.step()
    with torch.no_grad():
        score = model.score(parents(generator, 256, 12, symbols))
    return float(score.correct / score.targets)


def test_only_the_tree_tells_the_parent() -> None:
    actual = {
        name: accuracy_on_parents(position)
        for name, position in (("s", TreeOffsetPosition(16)), ("q", ShawPosition(16)))
    }
    assert actual["s"] >= 0.95, actual
    assert actual["q"] <= 0.4, actual
