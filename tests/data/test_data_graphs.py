"""Graphs from archives, text files and networkx: splits, batches, and one sentence for each defect."""

from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch

from manyformer.base.errors import UserError
from manyformer.config import GraphsData
from manyformer.data import OpenedData, open_data
from manyformer.data.graphs import graphs_of_networkx
from manyformer.nn.batches import IGNORE_INDEX, GraphBatch
from real_data import shared_data

# a triangle, a pair, and a single node
ARRAYS: dict[str, Any] = {
    "edges": np.array([[0, 1], [1, 2], [2, 0], [3, 4]]),
    "labels": np.array([0, 1, -1, 1, 0, 1]),
    "features": np.arange(12, dtype=np.float32).reshape(6, 2),
    "node_counts": np.array([3, 2, 1]),
    "train": np.array([0, 3]),
    "valid": np.array([1]),
    "test": np.array([4, 5]),
}


def write(folder: Path, **changes: Any) -> Path:
    arrays = {name: array for name, array in (ARRAYS | changes).items() if array is not None}
    np.savez(folder / "graphs.npz", **arrays)
    return folder / "graphs.npz"


def opened(folder: Path, form: str = "nodes", batch_tokens: int = 64, /, **settings: Any) -> OpenedData:
    section = GraphsData(**({"path": str(folder / "graphs.npz")} | settings))
    return open_data(section, form, batch_tokens=batch_tokens, cache=folder / "cache", seed=0)


def first_batch(batches: Any) -> GraphBatch:
    batch = next(iter(batches))
    assert isinstance(batch, GraphBatch)
    return batch


def test_graphs_of_a_row_are_segments_and_edges_go_both_ways(tmp_path: Path) -> None:
    write(tmp_path, labels=np.array([0, 1, 1, 1, 0, 1]), test=np.array([2, 4, 5]))
    data = opened(tmp_path)
    batch = first_batch(data.test)
    assert data.required_keywords == {"features": 2, "classes": 2}
    # rows are as long as the largest graph, and smaller ones share a row
    assert batch.segments is not None
    assert batch.segments.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert batch.targets.tolist() == [[IGNORE_INDEX, IGNORE_INDEX, 1], [IGNORE_INDEX, 0, 1]]
    assert batch.edges[1].tolist() == [[1, 0], [0, 1], *[[-1, -1]] * 4]
    assert batch.features[1].tolist() == ARRAYS["features"][3:].tolist()
    assert first_batch(data.valid).edges[0].tolist() == [[1, 0], [2, 0], [0, 1], [2, 1], [0, 2], [1, 2]]
    assert first_batch(data.valid).segments is None
    train = next(data.train)
    assert train.target_count() == 2
    assert train.token_count() == 5


def test_padding_counts_where_batches_are_filled(tmp_path: Path) -> None:
    write(tmp_path, labels=np.array([0, 1, 1, 1, 0, 1]), test=np.array([2, 4, 5]))
    rows = [batch.segments for batch in opened(tmp_path, "nodes", 5).test]
    assert [None if segments is None else segments.tolist() for segments in rows] == [None, [[0, 0], [0, -1]]]


def test_directed_edges_go_one_way(tmp_path: Path) -> None:
    write(tmp_path)
    assert first_batch(opened(tmp_path, directed=True).valid).edges[0].tolist() == [[2, 0], [0, 1], [1, 2]]


def test_a_graph_with_one_label_has_a_row(tmp_path: Path) -> None:
    write(tmp_path, labels=np.array([0, 1, 0]), train=np.array([0, 1]), valid=np.array([2]), test=None)
    batch = next(opened(tmp_path, "graphs", 8).train)
    assert sorted(batch.targets.tolist()) == [0, 1]
    assert batch.segments is not None
    assert sorted((batch.segments != -1).sum(1).tolist()) == [2, 3]
    assert (batch.edges[..., 0] != -1).sum(1).tolist() == [
        2 if size == 2 else 6 for size in (batch.segments != -1).sum(1).tolist()
    ]
    # two rows of three columns are more than five
    assert len(next(opened(tmp_path, "graphs", 5).train).targets) == 1


def test_sparse_features_keep_their_columns(tmp_path: Path) -> None:
    sparse = {
        "feature_rows": np.array([1, 0, 1]),
        "feature_columns": np.array([4, 2, 0]),
        "feature_values": np.array([1.0, 3.0, 3.0]),
        "shape": np.array([6, 5]),
    }
    write(tmp_path, features=None, **sparse)
    data = opened(tmp_path, feature_scale="sum")
    batch = first_batch(data.valid)
    assert data.required_keywords["features"] == 5
    assert batch.columns is not None
    dense = torch.zeros(3, 5).scatter_add_(1, batch.columns[0], batch.features[0])
    assert dense.tolist() == [[0, 0, 1, 0, 0], [0.75, 0, 0, 0, 0.25], [0, 0, 0, 0, 0]]


def test_labels_are_held_out_where_no_split_is_named(tmp_path: Path) -> None:
    write(tmp_path, train=None, valid=None, test=None)
    data = opened(tmp_path, valid=0.4)
    assert next(data.train).target_count() == 3
    assert first_batch(data.valid).target_count() == 2
    assert data.test is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": np.array([[0, 1], [3, 6]])}, "edge 1 joins the nodes 3 and 6, and nodes are 0 to 5"),
        ({"edges": np.array([[0, 1], [2, 3]])}, "edge 1 joins the nodes 2 and 3, which node_counts puts in the graphs"),
        ({"edges": np.array([0, 1])}, r"edges must be whole numbers of shape \(any, 2\), and is int64 of shape \(2,\)"),
        ({"edges": None}, "there is no array edges in it"),
        ({"features": None}, "neither an array features in it nor feature_rows, so nodes have no features"),
        ({"features": np.array([[1.0, 2.0]] * 4 + [[np.nan, 1.0]] * 2)}, "features of node 4 are no finite numbers"),
        ({"features": np.array([[1.0, 2.0]] * 4 + [[1e39, 1.0]] * 2)}, "features of node 4 are no finite numbers"),
        # as a number with a sign it would be -1, no label
        (
            {"labels": np.array([0, 1, 2**64 - 1, 1, 0, 1], np.uint64)},
            "labels has the number 18,446,744,073,709,551,615",
        ),
        ({"labels": np.full(6, -1)}, "two different labels at least, and there is nothing to learn"),
        ({"labels": np.array([0, 1, 0, 1])}, "there are 4 labels for 6 nodes in 3 graphs"),
        ({"labels": np.array([0, 1, 0, 1, -2, 0])}, "labels must be 0 to 65,535, or -1 for none"),
        ({"train": np.array([2])}, "there is no label to learn or to score in train"),
        ({"train": np.array([0, 4])}, "test and train share the number 4"),
        ({"train": np.array([0, 6])}, "train must be numbers from 0 to 5"),
        ({"node_counts": np.array([3, 2])}, "node_counts sum to 5, and there are features of 6 nodes"),
        ({"edge_features": np.zeros((3, 2))}, r"edge_features must be numbers of shape \(4, any\)"),
        ({"label_names": np.array(["a"])}, "label_names must be a text for each of 2 labels"),
    ],
)
def test_a_defect_of_an_archive_is_one_sentence(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_the_run_is_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(UserError, match="there are 6 labels, and 3 graphs, which the model labels"):
        opened(tmp_path, "graphs")
    with pytest.raises(UserError, match=r"batch.tokens is 2, less than the 3 nodes of graph 0"):
        opened(tmp_path, "nodes", 2)
    with pytest.raises(UserError, match="is for edges in a text file"):
        opened(tmp_path, nodes=str(path))


def text_files(folder: Path, edges: str, nodes: str) -> OpenedData:
    (folder / "graph.cites").write_text(edges)
    (folder / "graph.content").write_text(nodes)
    return opened(folder, path=str(folder / "graph.cites"), nodes=str(folder / "graph.content"), valid=0.3)


def test_text_files_are_read_as_the_files_of_cora(tmp_path: Path) -> None:
    data = text_files(tmp_path, "# cited citing\na b\nb c\n", "a 1 0 X\nb 0 1 Y\nc 1 1 X\nd 0 0 ?\n")
    batch = next(data.train)
    assert data.labels == ("X", "Y")
    assert batch.features[0].tolist() == [[1, 0], [0, 1], [1, 1], [0, 0]]
    assert batch.edges[0].tolist() == [[1, 0], [0, 1], [2, 1], [1, 2]]
    with pytest.raises(UserError, match=r"graph.cites:2: the node 'e' is not there"):
        text_files(tmp_path, "a b\na e\n", "a 1 X\nb 0 Y\n")
    with pytest.raises(UserError, match=r"graph.content:2: the features of node 'b' are not all numbers"):
        text_files(tmp_path, "a b\n", "a 1 X\nb z Y\n")
    with pytest.raises(UserError, match=r"graph.content:2: there are two nodes called 'a'"):
        text_files(tmp_path, "a b\n", "a 1 X\na 2 Y\n")


def test_graphs_of_networkx_are_written_and_read_again(tmp_path: Path) -> None:
    square, path = networkx.cycle_graph(4), networkx.path_graph(["p", "q"])
    for graph, label in ((square, "cycle"), (path, "path")):
        graph.graph["label"] = label
        networkx.set_node_attributes(graph, {node: [1.0, 2.0] for node in graph}, "features")
    graphs = graphs_of_networkx([square, path, square])
    graphs.write(tmp_path / "graphs.npz")
    data = opened(tmp_path, "graphs", valid=0.34)
    assert data.labels == ("cycle", "path")
    assert graphs.node_counts.tolist() == [4, 2, 4]
    assert graphs.edges.tolist()[4] == [4, 5]
    with pytest.raises(UserError, match="node 0 of graph 0 has no attribute 'x'"):
        graphs_of_networkx([square], features="x")


def test_positions_and_features_of_edges_reach_the_batch(tmp_path: Path) -> None:
    write(tmp_path, edge_features=np.arange(8, dtype=np.float32).reshape(4, 2))
    data = opened(tmp_path, laplacian=2)
    assert data.required_keywords == {"features": 2, "classes": 2, "edge_features": 2, "laplacian": 2}
    batch = first_batch(data.valid)
    assert batch.edge_features is not None
    assert batch.eigenvectors is not None
    # both directions of an edge have its features
    by_edge = dict(zip(map(tuple, batch.edges[0].tolist()), batch.edge_features[0].tolist()))
    assert by_edge[0, 1] == by_edge[1, 0] == [0, 1]
    assert by_edge[2, 0] == by_edge[0, 2] == [4, 5]
    # positions of a graph are orthogonal to its first eigenvector, which is constant in a triangle
    torch.testing.assert_close(batch.eigenvectors[0].sum(0), torch.zeros(2), rtol=0, atol=1e-6)


def test_cora_is_read_as_published(tmp_path: Path) -> None:
    data = opened(tmp_path, "nodes", 4096, path=str(shared_data("citations", "cora.npz")))
    batch = next(data.train)
    assert data.required_keywords == {"features": 1433, "classes": 7}
    assert batch.edges.shape == (1, 2 * 5278, 2)
    assert torch.bincount(batch.targets[batch.targets != IGNORE_INDEX]).tolist() == [20] * 7
    assert first_batch(data.test).target_count() == 1000
