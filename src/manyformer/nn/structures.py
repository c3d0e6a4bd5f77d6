"""Structures of tokens besides their sequence: dependency trees, graphs, and the order of the pixels of an image."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError

NO_NODE = -1
"""The value of all three columns for a token that belongs to no tree: a special token, padding."""
ROOT = 0
"""The head index of a word that has no head."""
_CYCLE_SHOWN = 12
"""The most words of a cycle that a message names."""


def preorder_columns(heads: Sequence[int]) -> NDArray[np.int64]:
    """Depth, preorder number and highest preorder number of its subtree for each word, an array (words, 3).

    `heads` are as in CoNLL-U: the index of each word's head, counted from 1, or `ROOT`. A single root has depth 0;
    several roots are children of a virtual one and have depth 1, so that they are not taken for the same node. Raises
    ValueError for a head that does not exist and for a cycle of heads.
    """
    children = _children_by_head(heads)
    depth = [0] * (len(heads) + 1)
    # the root of heads is no word: a single child of it has depth 0
    depth[ROOT] = 0 if len(children[ROOT]) > 1 else -1
    order: list[int] = []
    # a chain of words may be deeper than Python recurses; reversed, so that the first child is taken first
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
    # from the leaves up: descendants come after their head in preorder
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


MAX_NODES = 20_000
"""The largest graph whose Laplacian is decomposed: time grows with the cube of its nodes, memory with their square."""


def laplacian_eigenvectors(edges: NDArray[np.int64], nodes: int, count: int) -> NDArray[np.float32]:
    """The eigenvectors of the smallest eigenvalues of I - D^-1/2 A D^-1/2 without the first, an array (nodes, count).

    Dwivedi and Bresson 2021, section 2.1. Edges (e, 2) are taken in both directions. A graph of `count` nodes or fewer
    has zeros in the last columns. Raises ValueError for a graph of more than `MAX_NODES` nodes."""
    if nodes > MAX_NODES:
        raise ValueError(f"{nodes:,} nodes are too many for Laplacian positions, at most {MAX_NODES:,}")
    adjacency = np.zeros((nodes, nodes))
    adjacency[edges[:, 0], edges[:, 1]] = adjacency[edges[:, 1], edges[:, 0]] = 1
    # a node without edges keeps a row of zeros
    scale = np.maximum(adjacency.sum(1), 1) ** -0.5
    _, vectors = np.linalg.eigh(np.eye(nodes) - scale[:, None] * adjacency * scale)
    # `eigh` sorts ascending, and the first eigenvector is the same for every node of a connected graph
    chosen = vectors[:, 1 : count + 1]
    return np.pad(chosen, ((0, 0), (0, count - chosen.shape[1]))).astype(np.float32)


def pixel_order(shape: tuple[int, int, int], block: tuple[int, int]) -> NDArray[np.int64]:
    """The raster index of the image value (height, width, channels) at each position of the sequence.

    Raster indices count row by row, the channels of a pixel together. Pixels are in raster order within a block of
    (rows, columns), and so are blocks within the image (Parmar et al. 2018, section 3.3); blocks of one complete row
    give raster order. Raises UserError if the blocks do not divide the image.
    """
    height, width, channels = shape
    rows, columns = block
    if min(block) < 1 or height % rows or width % columns:
        raise UserError(f"an image of {height} x {width} cannot be cut into blocks of {rows} x {columns}")
    indices = np.arange(height * width * channels)
    # cut into a grid of blocks, of which rows of pixels are taken together
    blocks = indices.reshape(height // rows, rows, width // columns, columns, channels)
    return blocks.swapaxes(1, 2).ravel()
