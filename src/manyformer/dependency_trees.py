"""Dependency trees as facts of single words, from which the relation of any two words follows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NO_NODE = -1
"""What stands in all three columns for a token that hangs in no tree: a special token, padding."""

ROOT = 0
"""The head of a word that hangs on no other word."""


def preorder_columns(heads: Sequence[int]) -> NDArray[np.int64]:
    """Depth, preorder number and highest preorder number in its subtree of each word, as rows of three.

    `heads` are as in CoNLL-U: the number of the word that each word hangs on, counted from 1, or `ROOT`. A single root
    has depth 0; several hang on a virtual one and have depth 1, so that they are not taken for the same node. Raises
    ValueError for a head that does not exist and for words that hang on each other in a circle.
    """
    children = _children(heads)
    depth = [0] * (len(heads) + 1)
    depth[ROOT] = 0 if len(children[ROOT]) > 1 else -1
    order: list[int] = []
    todo = children[ROOT][::-1]
    while todo:
        word = todo.pop()
        depth[word] = depth[heads[word - 1]] + 1
        order.append(word)
        todo += children[word][::-1]
    if len(order) < len(heads):
        raise ValueError(_circle(heads, set(order)))
    size = [1] * (len(heads) + 1)
    found = np.empty((len(heads), 3), dtype=np.int64)
    for number in range(len(order) - 1, -1, -1):
        word = order[number]
        size[heads[word - 1]] += size[word]
        found[word - 1] = depth[word], number, number + size[word] - 1
    return found


def _children(heads: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in range(len(heads) + 1)]
    for word, head in enumerate(heads, 1):
        if not 0 <= head <= len(heads):
            raise ValueError(f"word {word} has the head {head}, which does not exist: there are {len(heads)} words")
        children[head].append(word)
    return children


def _circle(heads: Sequence[int], reached: set[int]) -> str:
    """The words of a circle in a sentence."""
    word = next(word for word in range(1, len(heads) + 1) if word not in reached)
    path: list[int] = []
    while word not in path:
        path.append(word)
        word = heads[word - 1]
    circle = path[path.index(word) :]
    if len(circle) == 1:
        return f"word {word} is its own head"
    return f"the words {', '.join(map(str, circle))} hang on each other in a circle, and not on the root"
