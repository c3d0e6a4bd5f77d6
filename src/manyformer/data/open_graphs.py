"""Opening graphs: read and checked once, then split and read as batches of nodes and edges."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from manyformer.config import GraphsData
from manyformer.data.array_archives import hash_arrays
from manyformer.data.array_checks import NO_LABEL, complete_splits, count_labels, find_items, unused_items
from manyformer.data.cache_folder import RECORD_FILE, PreparationResult, load_or_prepare, read_record
from manyformer.data.edge_list import read_edge_list
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.example_facts import ExampleFacts
from manyformer.data.graph_archive import GraphArrays, read_graph_archive
from manyformer.data.graph_batches import GraphEpoch, GraphForm, GraphPlan, GraphRows
from manyformer.data.kind import DataKind, OpenRequest, register
from manyformer.data.no_tokenizer import NoTokenizer
from manyformer.data.opened import EvaluationData, EvaluationPath, OpenedData, path_name
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.summary import DataSummary, LengthSummary
from manyformer.data.text_files import existing_path, file_stamp
from manyformer.errors import UserError
from manyformer.files.json_records import DamagedFile
from manyformer.files.verified_folder import VerifiedFolder
from manyformer.type_aliases import LogFn

GRAPHS_FILE = "graphs.npz"


def open_graphs(data: GraphsData, form: str, request: OpenRequest) -> OpenedData:
    """Open graphs for training; prepared files are reused if the sources have not changed."""
    graphs, fingerprint = _load_or_prepare(data, request)
    rows, splits = _rows_of(graphs, form, data), _split(graphs, data)
    settings = f"{fingerprint}-{form}-{data.directed}-{data.feature_scale}-{data.laplacian}-{data.valid}"
    plan = GraphPlan(rows, splits["train"], request.batch_tokens, settings)
    held_out = {name: _held_out_batches(rows, splits[name], request) for name in splits if name != "train"}
    keywords = {"features": graphs.feature_count, "classes": len(graphs.label_names)}
    if graphs.edge_features is not None:
        keywords["edge_features"] = graphs.edge_features.shape[1]
    if data.laplacian:
        keywords["laplacian"] = data.laplacian
    return OpenedData(
        tokenizers=_tokenizers(graphs),
        train=Sampler(plan, request.seed),
        valid=held_out["valid"],
        test=held_out.get("test"),
        summary_lines=tuple(_summary_lines(data, graphs, splits)),
        summary=_summarize(graphs, form, splits),
        length_limits=(),
        cache=request.cache,
        required_keywords=keywords,
    )


def held_out_graphs(data: GraphsData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """The held-out nodes or graphs of a run."""
    if read_record(request.cache) is None:
        open_graphs(data, form, request)
    graphs = _read_prepared(request.cache)
    splits = _split(graphs, data)
    name = split or ("test" if "test" in splits else "valid")
    if name not in splits:
        raise UserError(f"the run in {request.cache.parent} has no {name} data; its archive names none")
    return EvaluationData(name, _held_out_batches(_rows_of(graphs, form, data), splits[name], request))


def graphs_of_file(
    data: GraphsData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """The test items of another file, or all of its labelled ones. Raises UserError for labels the model lacks."""
    other = data.model_copy(update={"path": path_name(path)})
    graphs = _read_source(other, request.log)
    if graphs.label_names != (tokenizers.labels or ()):
        raise UserError(f"{path_name(path)}: its labels are {graphs.label_names}, the model's {tokenizers.labels}")
    split = graphs.splits.get("test", np.flatnonzero(graphs.labels != NO_LABEL))
    return EvaluationData(path_name(path), _held_out_batches(_rows_of(graphs, form, other), split, request))


def _load_or_prepare(data: GraphsData, request: OpenRequest) -> tuple[GraphArrays, str]:
    """The graphs, from the prepared file if there is one of the same sources, and a hash of them."""

    def prepare(folder: Path) -> PreparationResult:
        graphs = _read_source(data, request.log)
        graphs.write(folder / GRAPHS_FILE)
        digest = hash_arrays(graphs.to_arrays())
        previous = read_record(request.cache) if request.belongs_to_model else None
        if previous is not None and previous.sources.get(GRAPHS_FILE) != digest:
            raise UserError(
                f"{data.path}: these graphs are others than those that this run was trained on; restore the previous "
                "data, or start a new run"
            )
        return PreparationResult(_tokenizers(graphs), {}, {GRAPHS_FILE: digest}, {})

    stamps = [file_stamp(existing_path(path)) for path in (data.path, data.nodes) if path is not None]
    settings = {"kind": data.kind, "stamps": stamps}
    load_or_prepare(request.cache, settings, prepare, belongs_to_model=request.belongs_to_model, log=request.log)
    record = read_record(request.cache)
    assert record is not None
    return _read_prepared(request.cache), record.sources[GRAPHS_FILE]


def _read_source(data: GraphsData, log: LogFn) -> GraphArrays:
    """The graphs of an archive, or of two text files. Raises UserError where data.nodes is missing or too much."""
    path = existing_path(data.path)
    is_archive = path.suffix == ".npz"
    if is_archive and data.nodes is not None:
        raise UserError(f"data.nodes ({data.nodes}) is for edges in a text file; {path} is an archive with all nodes")
    if is_archive:
        return read_graph_archive(path, log)
    if data.nodes is None:
        raise UserError(f"{path} has the edges only: data.nodes must be a text file of nodes, features and labels")
    return read_edge_list(path, existing_path(data.nodes))


def _read_prepared(cache: Path) -> GraphArrays:
    """The prepared graphs, whose file is as it was written. Raises DamagedFile."""
    files = VerifiedFolder.open(cache)
    if GRAPHS_FILE not in files:
        raise DamagedFile(f"{cache / RECORD_FILE} is damaged: there is no {GRAPHS_FILE} beside it")
    return read_graph_archive(files.file(GRAPHS_FILE))


def _rows_of(graphs: GraphArrays, form: str, data: GraphsData) -> GraphRows:
    """The graphs as rows. Raises UserError for labels of nodes where those of graphs are learned, and vice versa."""
    items = {"nodes": len(graphs.values), "graphs": len(graphs.node_counts)}
    if len(graphs.labels) != items[form]:
        raise UserError(
            f"{data.path}: there are {len(graphs.labels):,} labels, and {items[form]:,} {form}, which the model labels"
        )
    if data.feature_scale == "sum":
        sums = graphs.values.sum(1, keepdims=True)
        # a node without any feature keeps its zeros
        graphs = graphs._replace(values=(graphs.values / np.where(sums == 0, 1, sums)).astype(np.float32))
    return GraphRows(graphs, cast(GraphForm, form), directed=data.directed, laplacian=data.laplacian)


def _split(graphs: GraphArrays, data: GraphsData) -> dict[str, NDArray[np.int64]]:
    return complete_splits(graphs.splits, np.flatnonzero(graphs.labels != NO_LABEL), data.valid, data.path)


def _held_out_batches(rows: GraphRows, split: NDArray[np.int64], request: OpenRequest) -> HeldOutBatches:
    return HeldOutBatches(GraphEpoch(rows, split, rows.graphs_of(split), request.batch_tokens), None)


def _summary_lines(data: GraphsData, graphs: GraphArrays, splits: dict[str, NDArray[np.int64]]) -> Iterator[str]:
    counts, edges = graphs.node_counts, graphs.edges
    kinds = "directed" if data.directed else "undirected"
    yield f"graphs: {data.path}; {len(counts):,} of {counts.sum():,} nodes and {len(edges):,} {kinds} edges"
    yield f"features: {graphs.feature_count:,} of a node; {len(graphs.label_names):,} labels"
    yield "; ".join(f"{name}: {_labelled(graphs, split):,} labels" for name, split in splits.items())


def _labelled(graphs: GraphArrays, split: NDArray[np.int64]) -> int:
    """How many items of a split have a label; those without one are not scored."""
    return int((graphs.labels[split] != NO_LABEL).sum())


def _summarize(graphs: GraphArrays, form: str, splits: dict[str, NDArray[np.int64]]) -> DataSummary:
    """What a person can check of the graphs."""
    noun, train = form.removesuffix("s"), splits["train"]
    has_edge = np.zeros(len(graphs.values), dtype=bool)
    # an edge from a node to itself leads nowhere
    has_edge[graphs.edges[graphs.edges[:, 0] != graphs.edges[:, 1]]] = True
    facts = ExampleFacts(["train"])
    for item in train[graphs.labels[train] != NO_LABEL]:
        label = graphs.label_names[graphs.labels[item]]
        facts.show([f"{noun} {item}", label], label)
    return DataSummary(
        noun=noun,
        counts={name: _labelled(graphs, split) for name, split in splits.items()},
        labels=count_labels(graphs.labels[train], graphs.label_names),
        # one graph has the number of nodes that the first line says
        lengths=LengthSummary.of(graphs.node_counts, "nodes", title="graphs") if len(graphs.node_counts) > 1 else None,
        left_out=(*unused_items(splits, graphs.labels, noun), *find_items(~has_edge, "node", "without an edge")),
        examples=facts.examples,
    )


def _tokenizers(graphs: GraphArrays) -> TokenizerPair:
    tokenizer = NoTokenizer()
    return TokenizerPair(tokenizer, tokenizer, graphs.label_names)


GRAPHS_KIND = register(
    DataKind(
        section=GraphsData,
        forms=("nodes", "graphs"),
        open=open_graphs,
        held_out=held_out_graphs,
        from_file=graphs_of_file,
    )
)
