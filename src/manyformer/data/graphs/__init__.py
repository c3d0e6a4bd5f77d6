"""Graphs in NumPy archives, in text files and of networkx: all nodes and edges, compared with each other when read."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.type_aliases import LogFn
from manyformer.data.storage.array_archives import (
    NO_LABEL,
    SPLIT_NAMES,
    array_members,
    check_labels,
    check_numbers,
    read_arrays,
    read_splits,
    whole_numbers,
    write_arrays,
)
from manyformer.data.text.text_files import read_lines

SPARSE_ARRAYS = ("feature_rows", "feature_columns", "feature_values", "shape")
ARRAYS = (
    *("edges", "labels", "features", *SPARSE_ARRAYS, "node_counts", "edge_features", "label_names"),
    *SPLIT_NAMES,
)


class GraphArrays(NamedTuple):
    """The nodes and edges of all graphs, one after another.

    `values` are the features of each node: all of them, or those in its `columns` alone, where zeros in column 0 fill
    up the rows. `edges` are pairs of nodes, counted through all graphs. `labels` has a class for each node, or for each
    graph, -1 for none. `splits` are indices of nodes or graphs, empty where none are named."""

    values: NDArray[np.float32]
    columns: NDArray[np.int64] | None
    feature_count: int
    edges: NDArray[np.int64]
    labels: NDArray[np.int64]
    node_counts: NDArray[np.int64]
    label_names: tuple[str, ...]
    edge_features: NDArray[np.float32] | None
    splits: Mapping[str, NDArray[np.int64]]

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of an archive that is read as these graphs."""
        arrays: dict[str, NDArray[Any]] = {
            "edges": self.edges,
            "labels": self.labels,
            "node_counts": self.node_counts,
            "label_names": np.array(self.label_names),
            **self.splits,
        }
        if self.edge_features is not None:
            arrays["edge_features"] = self.edge_features
        if self.columns is None:
            return arrays | {"features": self.values}
        # without the zeros that fill up rows
        rows, slots = self.values.nonzero()
        columns = self.columns[rows, slots]
        values = self.values[rows, slots]
        shape = np.array([len(self.values), self.feature_count])
        return arrays | dict(zip(SPARSE_ARRAYS, (rows, columns, values, shape)))

    def write(self, path: Path) -> None:
        """Write an archive that `data.path` may name."""
        write_arrays(path, self.to_arrays())


def read_graph_archive(path: Path, log: LogFn | None = None) -> GraphArrays:
    """The graphs in a NumPy archive; a line in the log names arrays that are not read.

    Raises UserError for a defect, with the number of the edge or node from 0 on."""
    members = array_members(path)
    for name in ("edges", "labels"):
        if name not in members:
            raise UserError(f"{path}: there is no array {name} in it; {suggest_names(name, members)}")
    return check_graphs(read_arrays(path, ARRAYS, log), str(path))


def read_edge_list(edge_file: Path, node_file: Path) -> GraphArrays:
    """A graph from a line for each edge (two names of nodes) and for each node (name, features, label).

    Columns are separated by white space, as in Cora's files cora.cites and cora.content; lines that begin with # are
    comments, and the label ? is none. Raises UserError with the line for a defect."""
    index: dict[str, int] = {}
    features = list[list[float]]()
    labels = list[str | None]()
    for number, cells in _cells_of_lines(node_file):
        location = f"{node_file}:{number}"
        if len(cells) < 3 or (features and len(cells) != len(features[0]) + 2):
            expected = "features"
            if features:
                expected = f"{len(features[0])} features"
            raise UserError(f"{location}: a line must be the name of a node, {expected} and a label, with white space")
        name, *numbers, label = cells
        # a new name gets the number of its line, a repeated one keeps that of its first
        if index.setdefault(name, len(index)) != len(features):
            raise UserError(f"{location}: there are two nodes called {name!r}")
        try:
            features.append([float(text) for text in numbers])
        except ValueError:
            raise UserError(f"{location}: the features of node {name!r} are not all numbers") from None
        labels.append(None if label == "?" else label)
    edges = []
    for number, cells in _cells_of_lines(edge_file):
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


def graphs_of_networkx(graphs: Iterable[Any], *, features: str = "features", label: str = "label") -> GraphArrays:
    """Graphs of networkx, whose nodes have an attribute `features` and, like the graphs or not, one called `label`.

    The labels are those of the graphs if these have any, else of the nodes; a missing one is None. Raises UserError for
    nodes without features, and as for archives."""
    graph_list = list(graphs)
    # one labelled graph is enough: the others are then graphs without a label
    per_graph = any(label in graph.graph for graph in graph_list)
    rows = list[Any]()
    names = list[Any]()
    edges = list[tuple[int, int]]()
    counts = list[int]()
    for number, graph in enumerate(graph_list):
        # nodes are counted through all graphs
        index = {node: len(rows) + position for position, node in enumerate(graph.nodes)}
        for node, attributes in graph.nodes(data=True):
            if features not in attributes:
                raise UserError(f"node {node!r} of graph {number} has no attribute {features!r}")
            rows.append(np.atleast_1d(attributes[features]))
            if not per_graph:
                names.append(attributes.get(label))
        if per_graph:
            names.append(graph.graph.get(label))
        edges += [(index[source], index[target]) for source, target in graph.edges]
        counts.append(len(index))
    if len({row.shape for row in rows}) > 1:
        raise UserError("the nodes of these graphs have features of different shapes; each needs equally many")
    arrays: dict[str, NDArray[Any]] = {
        "features": np.array(rows, dtype=np.float32).reshape(len(rows), -1),
        "edges": np.array(edges, dtype=np.int64).reshape(-1, 2),
        "node_counts": np.array(counts),
        **named_labels(names),
    }
    return check_graphs(arrays, "these graphs")


def named_labels(names: Iterable[Any]) -> dict[str, NDArray[Any]]:
    """The arrays labels and label_names for labels in any form, None for none."""
    texts = [None if name is None else str(name) for name in names]
    label_names = sorted({text for text in texts if text is not None})
    ids = {name: number for number, name in enumerate(label_names)}
    labels = np.array([NO_LABEL if text is None else ids[text] for text in texts], dtype=np.int64)
    return {"labels": labels, "label_names": np.array(label_names, dtype=str)}


def check_graphs(arrays: Mapping[str, NDArray[Any]], name: str) -> GraphArrays:
    """Graphs from arrays of a file called `name`, every one compared with the others. Raises UserError."""
    values, columns, feature_count = _read_features(arrays, name)
    nodes = len(values)
    if "node_counts" in arrays:
        node_counts = whole_numbers(arrays, "node_counts", (None,), name)
    else:
        # without counts all nodes are one graph
        node_counts = np.array([nodes])
    if (node_counts < 1).any() or node_counts.sum() != nodes:
        raise UserError(
            f"{name}: node_counts sum to {node_counts.sum():,}, and there are features of {nodes:,} nodes; each graph "
            "has a node at least"
        )
    edges = whole_numbers(arrays, "edges", (None, 2), name)
    _check_edges(edges, node_counts, name)
    labels = whole_numbers(arrays, "labels", (None,), name)
    label_names = check_labels(labels, arrays, name)
    if len(labels) not in (nodes, len(node_counts)):
        raise UserError(
            f"{name}: there are {len(labels):,} labels for {nodes:,} nodes in {len(node_counts):,} graphs; each node "
            "or each graph has one (-1 for none)"
        )
    edge_features = None
    if "edge_features" in arrays:
        edge_features = check_numbers(arrays, "edge_features", (len(edges), None), name, place=lambda i: f"edge {i}")
    splits = read_splits(arrays, labels, name)
    return GraphArrays(
        values=values,
        columns=columns,
        feature_count=feature_count,
        edges=edges,
        labels=labels,
        node_counts=node_counts,
        label_names=label_names,
        edge_features=edge_features,
        splits=splits,
    )


def _read_features(
    arrays: Mapping[str, NDArray[Any]], name: str
) -> tuple[NDArray[np.float32], NDArray[np.int64] | None, int]:
    """Features, their columns if they are sparse, and the number of columns."""
    if "features" in arrays:
        features = check_numbers(arrays, "features", (None, None), name, place=lambda i: f"node {i}")
        return features, None, features.shape[1]
    if missing := [key for key in SPARSE_ARRAYS if key not in arrays]:
        raise UserError(f"{name}: there is neither an array features in it nor {missing[0]}, so nodes have no features")
    rows, columns = (whole_numbers(arrays, key, (None,), name) for key in SPARSE_ARRAYS[:2])
    values = check_numbers(arrays, "feature_values", (len(rows),), name, place=lambda i: f"feature {i}")
    shape = whole_numbers(arrays, "shape", (2,), name)
    nodes = int(shape[0])
    width = int(shape[1])
    for key, index, count in (("feature_rows", rows, nodes), ("feature_columns", columns, width)):
        if len(index) != len(values) or (len(index) and not 0 <= index.min() <= index.max() < count):
            raise UserError(f"{name}: {key} must be {len(values):,} numbers from 0 to {count - 1}, as shape says")
    # entries of a row need not stand together, and stay in their order
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=nodes)
    # the place of each entry within its row
    slots = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    dense = np.zeros((nodes, max(1, int(counts.max(initial=0)))), dtype=np.float32)
    dense_columns = np.zeros(dense.shape, dtype=np.int64)
    dense[rows[order], slots] = values[order]
    dense_columns[rows[order], slots] = columns[order]
    return dense, dense_columns, width


def _check_edges(edges: NDArray[np.int64], node_counts: NDArray[np.int64], name: str) -> None:
    """Raise UserError for an edge of a node that is not there, or of nodes of two graphs."""
    stops = node_counts.cumsum()
    # the first such edge, if there is one
    for edge in ((edges < 0) | (edges >= stops[-1])).any(1).nonzero()[0][:1]:
        source, target = edges[edge].tolist()
        raise UserError(
            f"{name}: edge {edge} joins the nodes {source} and {target}, and nodes are 0 to {stops[-1] - 1}"
        )
    graphs = np.searchsorted(stops, edges, side="right")
    for edge in (graphs[:, 0] != graphs[:, 1]).nonzero()[0][:1]:
        source, target = edges[edge].tolist()
        raise UserError(
            f"{name}: edge {edge} joins the nodes {source} and {target}, which node_counts puts in the graphs "
            f"{graphs[edge, 0]} and {graphs[edge, 1]}"
        )


def _cells_of_lines(path: Path) -> list[tuple[int, list[str]]]:
    return [(line.number, line.text.split()) for line in read_lines(path) if line.text.strip()[:1] not in ("", "#")]
