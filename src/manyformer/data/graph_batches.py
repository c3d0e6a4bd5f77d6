"""Batches of graphs: rows as long as the largest graph, which smaller ones share where it is nodes that have labels."""

import functools
from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, GraphBatch
from manyformer.core import PADDING_SEGMENT
from manyformer.data.array_checks import NO_LABEL
from manyformer.data.epochs import Epoch, EpochPlan, random_generator
from manyformer.data.graph_archive import GraphArrays
from manyformer.errors import UserError
from manyformer.structures.graph_laplacian import laplacian_eigenvectors

GraphForm = Literal["nodes", "graphs"]
"""What has a label: each node, or each graph."""
NO_EDGE = -1


@final
class GraphRows:
    """The graphs of a data set as rows of batches; edges are read in both directions unless they are `directed`.

    `laplacian` is the number of eigenvectors that are a node's position. Raises UserError for a graph too large for
    them."""

    def __init__(self, graphs: GraphArrays, form: GraphForm, *, directed: bool, laplacian: int = 0) -> None:
        self.graphs = graphs
        self.form = form
        self._stops = graphs.node_counts.cumsum()
        self._starts = self._stops - graphs.node_counts
        edges = graphs.edges
        edge_features = graphs.edge_features
        if not directed:
            edges = np.concatenate([edges, edges[:, ::-1]])
            if edge_features is None:
                edge_features = None
            else:
                edge_features = np.concatenate([edge_features, edge_features])
        # sorted by target, and each only once
        self._edges, first = np.unique(edges[:, ::-1], axis=0, return_index=True)
        self._edges = self._edges[:, ::-1]
        if edge_features is None:
            self._edge_features = None
        else:
            self._edge_features = edge_features[first]
        self._edge_bounds = np.searchsorted(self._edges[:, 1], np.append(self._starts, self._stops[-1]))

        self._eigenvectors = self._laplacian_positions(laplacian) if laplacian else None

    def graphs_of(self, split: NDArray[np.int64]) -> NDArray[np.int64]:
        """The graphs that have an item of the split."""
        if self.form == "graphs":
            return split
        return np.unique(np.searchsorted(self._stops, split, side="right"))

    def batch(self, rows: Sequence[Sequence[int]], split: NDArray[np.int64]) -> GraphBatch:
        """The batch with these graphs in each row, and the labels of the items of the split as targets."""
        nodes = [np.concatenate([self._nodes(graph) for graph in row]) for row in rows]
        width = max(map(len, nodes))
        segments = np.full((len(rows), width), PADDING_SEGMENT)
        for number, row in enumerate(rows):
            counts = self.graphs.node_counts[list(row)]
            segments[number, : counts.sum()] = np.repeat(np.arange(len(row)), counts)
        edge_rows = [self._row_edges(row) for row in rows]
        columns = self.graphs.columns
        edge_features = self._edge_features
        eigenvectors = self._eigenvectors
        return GraphBatch(
            _pad_rows([self.graphs.values[index] for index in nodes], 0),
            _pad_rows([edges for _, edges in edge_rows], NO_EDGE),
            self._targets(rows, nodes, split),
            torch.from_numpy(segments) if segments.any() else None,
            None if columns is None else _pad_rows([columns[index] for index in nodes], 0),
            None if edge_features is None else _pad_rows([edge_features[index] for index, _ in edge_rows], 0),
            None if eigenvectors is None else _pad_rows([eigenvectors[index] for index in nodes], 0),
        )

    def _laplacian_positions(self, count: int) -> NDArray[np.float32]:
        bounds = self._edge_bounds
        try:
            return np.concatenate(
                [
                    laplacian_eigenvectors(self._edges[bounds[graph] : bounds[graph + 1]] - start, int(nodes), count)
                    for graph, (start, nodes) in enumerate(zip(self._starts, self.graphs.node_counts))
                ]
            )
        except ValueError as error:
            raise UserError(f"data.laplacian={count}: {error}") from None

    def _nodes(self, graph: int) -> NDArray[np.int64]:
        return np.arange(self._starts[graph], self._stops[graph])

    def _row_edges(self, row: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The indices of the edges of a row, and the edges between columns of the row."""
        indices = [np.arange(self._edge_bounds[graph], self._edge_bounds[graph + 1]) for graph in row]
        counts = self.graphs.node_counts[list(row)]
        shifts = np.repeat(counts.cumsum() - counts - self._starts[list(row)], [len(index) for index in indices])
        index = np.concatenate(indices)
        return index, self._edges[index] + shifts[:, None]

    def _targets(
        self, rows: Sequence[Sequence[int]], nodes: Sequence[NDArray[np.int64]], split: NDArray[np.int64]
    ) -> Tensor:
        is_scored = np.zeros(len(self.graphs.labels), dtype=bool)
        is_scored[split] = True
        targets = np.where(is_scored & (self.graphs.labels != NO_LABEL), self.graphs.labels, IGNORE_INDEX)
        if self.form == "graphs":
            return torch.from_numpy(targets[[row[0] for row in rows]])
        return _pad_rows([targets[index] for index in nodes], IGNORE_INDEX)


@final
class GraphEpoch(Epoch):
    """Batches of graphs in the order given: as many as fit into `batch_tokens` nodes, padding counted."""

    def __init__(self, rows: GraphRows, split: NDArray[np.int64], order: NDArray[np.int64], batch_tokens: int) -> None:
        self._rows = rows
        self._split = split
        self._batches = _group_graphs(rows, order.tolist(), batch_tokens)
        # a single large graph is the same batch in every step
        self._cached_batch = functools.lru_cache(maxsize=1)(self._make)

    def __len__(self) -> int:
        return len(self._batches)

    def batch(self, number: int) -> GraphBatch:
        return self._cached_batch(number)

    def _make(self, number: int) -> GraphBatch:
        return self._rows.batch(self._batches[number], self._split)


@final
class GraphPlan(EpochPlan):
    """Epochs of all graphs with an item of the split, in shuffled order."""

    def __init__(self, rows: GraphRows, split: NDArray[np.int64], batch_tokens: int, fingerprint: str) -> None:
        self._rows = rows
        self._split = split
        self._batch_tokens = batch_tokens
        self.fingerprint = f"{fingerprint}-{batch_tokens}"
        self._order = rows.graphs_of(split)
        self._single_epoch = GraphEpoch(rows, split, self._order, batch_tokens) if len(self._order) == 1 else None

    def epoch(self, seed: int, number: int) -> GraphEpoch:
        if self._single_epoch is not None:
            return self._single_epoch
        order = random_generator(seed, number).permutation(self._order)
        return GraphEpoch(self._rows, self._split, order, self._batch_tokens)


def _group_graphs(rows: GraphRows, order: Sequence[int], batch_tokens: int) -> list[list[list[int]]]:
    """The graphs of each row of each batch; no row is longer than the largest graph of its batch."""
    batches: list[list[list[int]]] = []
    last_row_nodes = width = 0
    for graph in order:
        nodes = int(rows.graphs.node_counts[graph])
        if nodes > batch_tokens:
            raise UserError(
                f"batch.tokens is {batch_tokens:,}, less than the {nodes:,} nodes of graph {graph}; set it to "
                "that or more"
            )
        shares_row = rows.form == "nodes" and last_row_nodes + nodes <= width
        if not batches or (len(batches[-1]) + (not shares_row)) * max(width, nodes) > batch_tokens:
            batches.append([])
            width = nodes
            shares_row = False
        if shares_row:
            batches[-1][-1].append(graph)
        else:
            batches[-1].append([graph])
        last_row_nodes = last_row_nodes + nodes if shares_row else nodes
        width = max(width, nodes)
    return batches


def _pad_rows(rows: Sequence[NDArray[np.generic]], value: float) -> Tensor:
    """Arrays of equal shape but for their first axis as one tensor, filled up with `value`."""
    padded = np.full((len(rows), max(map(len, rows)), *rows[0].shape[1:]), value, dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return torch.from_numpy(padded)
