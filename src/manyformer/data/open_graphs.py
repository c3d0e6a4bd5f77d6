"""Opening graphs: read and checked once, then split and read as batches of nodes and edges."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import numpy as np

from manyformer.config import GraphsData
from manyformer.data.array_checks import NO_LABEL, complete_splits, count_labels, find_items, unused_items
from manyformer.data.array_pipeline import ArrayPipeline
from manyformer.data.example_facts import ExampleFacts
from manyformer.data.graph_archive import GraphArrays, read_edge_list, read_graph_archive
from manyformer.data.graph_batches import GraphEpoch, GraphForm, GraphPlan, GraphRows
from manyformer.data.kind import register
from manyformer.data.summary import DataSummary, LengthSummary
from manyformer.data.text_files import existing_path, file_stamp
from manyformer.errors import UserError
from manyformer.type_aliases import IntArray


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
        """How many items of a split have a label; those without one are not scored."""
        return int((self.arrays.labels[split] != NO_LABEL).sum())


GRAPHS_KIND = register(GraphsPipeline.data_kind())
