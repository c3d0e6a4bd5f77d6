"""Opening graphs: read and checked once, then split and read as batches of nodes and edges.

Rows are as long as the largest graph; smaller ones share a row where nodes have the labels."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import IntArray
from manyformer.config import GraphsData
from manyformer.data.batching.epochs import Epoch, EpochPlan, random_generator
from manyformer.data.graphs import GraphArrays, read_edge_list, read_graph_archive
from manyformer.data.pipeline.array_pipeline import ArrayPipeline
from manyformer.data.pipeline.kind import register
from manyformer.data.pipeline.summary import DataSummary, ExampleFacts, LengthSummary
from manyformer.data.storage.array_archives import NO_LABEL, complete_splits, count_labels, find_items, unused_items
from manyformer.data.text.text_files import existing_path, file_stamp
from manyformer.nn.batches import IGNORE_INDEX, GraphBatch
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.nn.structures import laplacian_eigenvectors

GraphForm = Literal["nodes", "graphs"]
"""The items that have a label: nodes, or graphs."""
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
            # messages pass along edges, so an undirected one needs both directions
            edges = np.concatenate([edges, edges[:, ::-1]])
            if edge_features is not None:
                edge_features = np.concatenate([edge_features, edge_features])
        # sorted by target, and each only once
        self._edges, first = np.unique(edges[:, ::-1], axis=0, return_index=True)
        self._edges = self._edges[:, ::-1]
        self._edge_features = None if edge_features is None else edge_features[first]
        self._edge_bounds = np.searchsorted(self._edges[:, 1], np.append(self._starts, self._stops[-1]))

        # once, since their time grows with the cube of the nodes
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
            # graphs of a row are segments, which see nothing of each other
            segments[number, : counts.sum()] = np.repeat(np.arange(len(row)), counts)
        edge_rows = [self._row_edges(row) for row in rows]
        batch = GraphBatch(
            features=_pad_rows([self.graphs.values[index] for index in nodes], 0),
            edges=_pad_rows([edges for _, edges in edge_rows], NO_EDGE),
            targets=self._targets(rows, nodes, split),
            # all 0: one graph a row, and all of one size
            segments=torch.from_numpy(segments) if segments.any() else None,
        )
        columns = self.graphs.columns
        edge_features = self._edge_features
        eigenvectors = self._eigenvectors
        if columns is not None:
            batch = batch._replace(columns=_pad_rows([columns[index] for index in nodes], 0))
        if edge_features is not None:
            batch = batch._replace(edge_features=_pad_rows([edge_features[index] for index, _ in edge_rows], 0))
        if eigenvectors is not None:
            batch = batch._replace(eigenvectors=_pad_rows([eigenvectors[index] for index in nodes], 0))
        return batch

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
        # from numbers through all graphs to columns of the row
        shifts = np.repeat(counts.cumsum() - counts - self._starts[list(row)], [len(index) for index in indices])
        index = np.concatenate(indices)
        return index, self._edges[index] + shifts[:, None]

    def _targets(
        self, rows: Sequence[Sequence[int]], nodes: Sequence[NDArray[np.int64]], split: NDArray[np.int64]
    ) -> Tensor:
        # other splits' nodes stay in the graph, and are no targets
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
        # a single graph has no order to shuffle: its batch is made once
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
        # one label belongs to a row, so labelled graphs have a row each
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


class GraphsPipeline(ArrayPipeline[GraphsData, GraphArrays, IntArray]):
    """Graphs in the form "nodes", of which each has a label, or "graphs", which have one each.

    A split is the numbers of its nodes or graphs."""

    section = GraphsData
    forms = ("nodes", "graphs")
    read_archive = staticmethod(read_graph_archive)
    nouns = "graphs"

    def stamps(self) -> list[list[str | int]]:
        return [file_stamp(existing_path(path)) for path in (self.data.path, self.data.nodes) if path is not None]

    def read_sources(self) -> GraphArrays:
        """The graphs of an archive, or of two text files, of which data.nodes is one."""
        path = existing_path(self.path)
        nodes = self.data.nodes
        is_archive = path.suffix == ".npz"
        if is_archive and nodes is not None:
            raise UserError(f"data.nodes ({nodes}) is for edges in a text file; {path} is an archive with all nodes")
        if is_archive:
            return self.read_archive(path, self.request.log)
        if nodes is None:
            raise UserError(f"{path} has the edges only: data.nodes must be a text file of nodes, features and labels")
        return read_edge_list(path, existing_path(nodes))

    def label_names(self) -> tuple[str, ...]:
        return self.arrays.label_names

    @cached_property
    def rows(self) -> GraphRows:
        """The graphs as rows. Raises UserError for labels of nodes where graphs are labelled, and vice versa."""
        graphs = self.arrays
        data = self.data
        items = {"nodes": len(graphs.values), "graphs": len(graphs.node_counts)}[self.form]
        if len(graphs.labels) != items:
            raise UserError(
                f"{self.path}: there are {len(graphs.labels):,} labels, and {items:,} {self.form}, which the model "
                "labels"
            )
        if data.feature_scale == "sum":
            sums = graphs.values.sum(1, keepdims=True)
            # a node without any feature keeps its zeros
            graphs = graphs._replace(values=(graphs.values / np.where(sums == 0, 1, sums)).astype(np.float32))
        return GraphRows(graphs, cast(GraphForm, self.form), directed=data.directed, laplacian=data.laplacian)

    def splits(self) -> dict[str, IntArray]:
        return complete_splits(self.arrays.splits, self.arrays.labels, self.data.valid, self.path)

    def split_of_file(self) -> IntArray:
        self.check_labels()
        return self.arrays.splits.get("test", np.flatnonzero(self.arrays.labels != NO_LABEL))

    def plan(self, train: IntArray, fingerprint: str) -> GraphPlan:
        data = self.data
        settings = f"{fingerprint}-{self.form}-{data.directed}-{data.feature_scale}-{data.laplacian}-{data.valid}"
        return GraphPlan(self.rows, train, self.request.batch_tokens, settings)

    def fixed_epoch(self, split: IntArray) -> GraphEpoch:
        return GraphEpoch(self.rows, split, self.rows.graphs_of(split), self.request.batch_tokens)

    def required_keywords(self, train: IntArray) -> dict[str, Any]:
        graphs = self.arrays
        keywords = {"features": graphs.feature_count, "classes": len(graphs.label_names)}
        if graphs.edge_features is not None:
            keywords["edge_features"] = graphs.edge_features.shape[1]
        if self.data.laplacian:
            keywords["laplacian"] = self.data.laplacian
        return keywords

    def describe(self, splits: Mapping[str, IntArray]) -> Iterator[str]:
        graphs = self.arrays
        counts = graphs.node_counts
        edges = f"{len(graphs.edges):,} {'directed' if self.data.directed else 'undirected'} edges"
        yield f"graphs: {self.path}; {len(counts):,} of {counts.sum():,} nodes and {edges}"
        yield f"features: {graphs.feature_count:,} of a node; {len(graphs.label_names):,} labels"
        yield "; ".join(f"{name}: {self._labelled(split):,} labels" for name, split in splits.items())

    def summarize(self, splits: Mapping[str, IntArray]) -> DataSummary:
        graphs = self.arrays
        train = splits["train"]
        noun = self.form.removesuffix("s")
        has_edge = np.zeros(len(graphs.values), dtype=bool)
        # an edge from a node to itself leads nowhere
        has_edge[graphs.edges[graphs.edges[:, 0] != graphs.edges[:, 1]]] = True
        facts = ExampleFacts(["train"])
        for item in train[graphs.labels[train] != NO_LABEL]:
            label = graphs.label_names[graphs.labels[item]]
            facts.show([f"{noun} {item}", label], label)
        # one graph has the number of nodes that the first line says
        has_lengths = len(graphs.node_counts) > 1
        return DataSummary(
            noun=noun,
            counts={name: self._labelled(split) for name, split in splits.items()},
            labels=count_labels(graphs.labels[train], graphs.label_names),
            lengths=LengthSummary.of(graphs.node_counts, "nodes", title="graphs") if has_lengths else None,
            left_out=(
                *unused_items(splits, graphs.labels, noun),
                *find_items(~has_edge, "node", "without an edge"),
            ),
            examples=facts.examples,
        )

    def _labelled(self, split: IntArray) -> int:
        """The number of items of a split that have a label; those without one are not scored."""
        return int((self.arrays.labels[split] != NO_LABEL).sum())


GRAPHS_KIND = register(GraphsPipeline.data_kind())
