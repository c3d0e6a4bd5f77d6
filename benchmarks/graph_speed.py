"""A training step of `gat` against torch_geometric's `GATConv`, and its memory on a large graph.

    python benchmarks/graph_speed.py cora.npz        # one line for each; the steps take turns
    python benchmarks/graph_speed.py --large         # 100,000 nodes with 1,000,000 edges: the largest resident memory

torch_geometric (in the extra `peers`) reads dense features; ours are measured with sparse ones, as the data gives them,
and with dense ones.
"""

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyformer as mf
from manyformer.config import GraphsData
from manyformer.data import open_data
from manyformer.models import Model
from manyformer.nn.batches import GraphBatch

STEPS, WARMUP = 15, 3
HEADS, WIDTH, DROPOUT = 8, 8, 0.6


class GATConvModel(nn.Module):
    """Two layers of torch_geometric with the dropout and the ELU of the paper."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv

        self.first = GATConv(features, WIDTH, heads=HEADS, dropout=DROPOUT)
        self.last = GATConv(HEADS * WIDTH, classes, heads=1, concat=False, dropout=DROPOUT)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.elu(self.first(F.dropout(x, DROPOUT, self.training), edges))
        y: Tensor = self.last(F.dropout(x, DROPOUT, self.training), edges)
        return y


def training_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A function that makes one step of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def model_step(model: Model, batch: GraphBatch) -> Callable[[], None]:
    def loss() -> Tensor:
        result = model.loss(batch)
        return result.total / result.targets

    return training_step(model, loss)


def gat_conv_step(batch: GraphBatch, features: int, classes: int) -> Callable[[], None]:
    model, edges = GATConvModel(features, classes), batch.edges[0].t().contiguous()
    return training_step(model, lambda: F.cross_entropy(model(batch.features[0], edges), batch.targets[0]))


def with_dense_features(batch: GraphBatch, features: int) -> GraphBatch:
    """The batch with all columns of its features."""
    assert batch.columns is not None
    dense = batch.features.new_zeros(*batch.features.shape[:2], features).scatter_add_(2, batch.columns, batch.features)
    return batch._replace(features=dense, columns=None)


def cpu_milliseconds(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The median CPU time of each step; they take turns, so that other work of the machine meets both."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARMUP + STEPS):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if number >= WARMUP:
                times[name].append(1000 * (time.process_time() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def compare_steps(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        section = GraphsData(path=str(path), feature_scale="sum")
        data = open_data(section, "nodes", batch_tokens=1 << 20, cache=Path(folder), seed=0)
        batch = next(data.train)
    assert isinstance(batch, GraphBatch)
    keywords = dict(data.required_keywords)
    dense = with_dense_features(batch, keywords["features"])
    steps = {
        "gat": model_step(mf.build("gat", **keywords), batch),
        "gat, dense features": model_step(mf.build("gat", **keywords), dense),
        "GATConv": gat_conv_step(dense, **keywords),
    }
    times = cpu_milliseconds(steps)
    for name, value in times.items():
        print(f"{name:20} {value:8.1f} ms a step, {value / times['GATConv']:5.2f} of GATConv's")


def measure_large(nodes: int = 100_000, edges: int = 1_000_000, features: int = 64) -> None:
    batch = GraphBatch(
        torch.randn(1, nodes, features), torch.randint(nodes, (1, edges, 2)), torch.randint(7, (1, nodes))
    )
    step = model_step(mf.build("gat", features=features, classes=7), batch)
    start = time.perf_counter()
    step()
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{nodes:,} nodes, {edges:,} edges: {gigabytes:.2f} GB, {time.perf_counter() - start:.1f} s a step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, nargs="?")
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    if options.archive is not None:
        compare_steps(options.archive)
    if options.large:
        measure_large()
