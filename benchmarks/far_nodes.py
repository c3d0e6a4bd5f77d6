"""Write rings of nodes whose label is the symbol of the node opposite: `python benchmarks/far_nodes.py far-nodes.npz`.

Only a model that reads nodes at half the length of a ring can tell the labels; `compare graphs/far-nodes` trains some.
"""

import argparse
from pathlib import Path

import numpy as np

from manyformer.data.graphs import GraphArrays

SYMBOLS = 4
SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}


def draw_rings(rings: int, nodes: int, seed: int) -> GraphArrays:
    """Rings of `nodes` nodes in random order, one feature of each node for its symbol."""
    generator = np.random.default_rng(seed)
    symbols = generator.integers(SYMBOLS, size=(rings, nodes))
    order = generator.permuted(np.tile(np.arange(nodes), (rings, 1)), axis=1)
    starts = np.arange(rings)[:, None] * nodes
    # by place on the ring: the number of the node there, and the symbol of that opposite
    edges = np.stack([order + starts, np.roll(order, -1, axis=1) + starts], -1).reshape(-1, 2)
    at_place = np.take_along_axis(symbols, order, axis=1)
    labels = np.empty_like(symbols)
    np.put_along_axis(labels, order, np.roll(at_place, nodes // 2, axis=1), axis=1)
    bounds = (np.cumsum([0.0, *SHARES.values()]) * rings).round().astype(int) * nodes
    return GraphArrays(
        edges=edges,
        labels=labels.ravel(),
        values=np.eye(SYMBOLS, dtype=np.float32)[symbols.ravel()],
        columns=None,
        feature_count=SYMBOLS,
        node_counts=np.full(rings, nodes),
        edge_features=None,
        label_names=tuple("ABCD"[:SYMBOLS]),
        splits={name: np.arange(*bounds[number : number + 2]) for number, name in enumerate(SHARES)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rings", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=16, help="an even number")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw_rings(arguments.rings, arguments.nodes, arguments.seed).write(arguments.out)


if __name__ == "__main__":
    main()
