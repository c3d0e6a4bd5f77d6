"""Dependency trees encoded as three numbers per word, from which the tree relation of any two words follows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NO_NODE = -1
"""The value of all three columns for a token that belongs to no tree: a special token, padding."""

ROOT = 0
"""The head index of a word that has no head."""
_CYCLE_SHOWN = 12
"""So many words of a cycle are named."""


def preorder_columns(heads: Sequence[int]) -> NDArray[np.int64]:
    """Depth, preorder number and highest preorder number of its subtree for each word, an array (words, 3).

    `heads` are as in CoNLL-U: the index of each word's head, counted from 1, or `ROOT`. A single root has depth 0;
    several roots are children of a virtual one and have depth 1, so that they are not taken for the same node. Raises
    ValueError for a head that does not exist and for a cycle of heads.
    """
    children = _children_by_head(heads)
    depth = [0] * (len(heads) + 1)
    depth[ROOT] = 0 if len(children[ROOT]) > 1 else -1
    order: list[int] = []
    stack = children[ROOT][::-1]
    while stack:
        word = stack.pop()
        depth[word] = depth[heads[word - 1]] + 1
        order.append(word)
        stack += children[word][::-1]
    if len(order) < len(heads):
        raise ValueError(_describe_cycle(heads, set(order)))
    size = [1] * (len(heads) + 1)
    columns = np.empty((len(heads), 3), dtype=np.int64)
    for number in range(len(order) - 1, -1, -1):
        word = order[number]
        size[heads[word - 1]] += size[word]
        columns[word - 1] = depth[word], number, number + size[word] - 1
    return columns


def _children_by_head(heads: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in range(len(heads) + 1)]
    for word, head in enumerate(heads, 1):
        if not 0 <= head <= len(heads):
            raise ValueError(f"word {word} has the head {head}, which does not exist: there are {len(heads)} words")
        children[head].append(word)
    return children


def _describe_cycle(heads: Sequence[int], reached: set[int]) -> str:
    """A sentence that names the words of a cycle among those that the traversal did not reach."""
    word = next(word for word in range(1, len(heads) + 1) if word not in reached)
    # a dictionary, which finds a word at once and keeps their order
    path: dict[int, None] = {}
    while word not in path:
        path[word] = None
        word = heads[word - 1]
    words = list(path)
    cycle = words[words.index(word) :]
    if len(cycle) == 1:
        return f"word {word} is its own head"
    shown = ", ".join(map(str, cycle[:_CYCLE_SHOWN])) + ", ..." * (len(cycle) > _CYCLE_SHOWN)
    return f"the heads of the words {shown} form a cycle that does not reach the root"
