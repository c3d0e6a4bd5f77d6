"""Positions of nodes in a graph: eigenvectors of its Laplacian."""

import numpy as np
from numpy.typing import NDArray

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
    scale = np.maximum(adjacency.sum(1), 1) ** -0.5
    _, vectors = np.linalg.eigh(np.eye(nodes) - scale[:, None] * adjacency * scale)
    chosen = vectors[:, 1 : count + 1]
    return np.pad(chosen, ((0, 0), (0, count - chosen.shape[1]))).astype(np.float32)
