"""Graphs as text: a file of edges, and one of nodes with their features and labels."""

from pathlib import Path

import numpy as np

from manyformer.data.graph_archive import GraphArrays, check_graphs, named_labels
from manyformer.data.text_files import read_lines
from manyformer.errors import UserError


def read_edge_list(edge_file: Path, node_file: Path) -> GraphArrays:
    """A graph from a line for each edge (two names of nodes) and for each node (name, features, label).

    Columns are separated by white space, as in Cora's files cora.cites and cora.content; lines that begin with # are
    comments, and the label ? is none. Raises UserError with the line for a defect."""
    index: dict[str, int] = {}
    features, labels = list[list[float]](), list[str | None]()
    for number, cells in _rows(node_file):
        location = f"{node_file}:{number}"
        if len(cells) < 3 or (features and len(cells) != len(features[0]) + 2):
            expected = f"{len(features[0])} features" if features else "features"
            raise UserError(f"{location}: a line must be the name of a node, {expected} and a label, with white space")
        name, *numbers, label = cells
        if index.setdefault(name, len(index)) != len(features):
            raise UserError(f"{location}: there are two nodes called {name!r}")
        try:
            features.append([float(text) for text in numbers])
        except ValueError:
            raise UserError(f"{location}: the features of node {name!r} are not all numbers") from None
        labels.append(None if label == "?" else label)
    edges = []
    for number, cells in _rows(edge_file):
        if len(cells) != 2:
            raise UserError(f"{edge_file}:{number}: a line must be the names of two nodes, and has {len(cells)} words")
        if missing := [name for name in cells if name not in index]:
            raise UserError(f"{edge_file}:{number}: the node {missing[0]!r} is not there; {node_file} has no such name")
        edges.append([index[name] for name in cells])
    arrays = {
        "features": np.array(features, dtype=np.float64).reshape(len(features), -1),
        "edges": np.array(edges, dtype=np.int64).reshape(-1, 2),
        **named_labels(labels),
    }
    return check_graphs(arrays, f"{edge_file} and {node_file}")


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    return [(line.number, line.text.split()) for line in read_lines(path) if line.text.strip()[:1] not in ("", "#")]
