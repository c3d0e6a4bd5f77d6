"""A training step of `gat` against gathers and scatters as in common libraries, and its memory on a large graph.

    python benchmarks/graph_speed.py cora.npz        # one line for each; the steps take turns
    python benchmarks/graph_speed.py --large         # 100,000 nodes with 1,000,000 edges: the largest resident memory

The other step is written from the formulas as graph libraries compute them: dense features with torch's dropout, a
gathered copy of the projected nodes for every edge, `scatter_reduce` and `index_add`, gradients by autograd.
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
from manyformer.batches import GraphBatch
from manyformer.config import GraphsData
from manyformer.data import open_data
from manyformer.models import Model

STEPS, WARMUP = 15, 3
HEADS, WIDTH, DROPOUT = 8, 8, 0.6


class GatherScatterLayer(nn.Module):
    """GAT's layer (Velickovic et al. 2018, equations 1 to 6) with autograd alone."""

    def __init__(self, inputs: int, heads: int, width: int, *, concat: bool) -> None:
        super().__init__()
        self.heads, self.width, self.concat = heads, width, concat
        self.projection = nn.Linear(inputs, heads * width, bias=False)
        self.source, self.target = (nn.Parameter(torch.randn(1, heads, width) * 0.1) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(heads * width if concat else width))

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        x = F.dropout(x, DROPOUT, self.training)
        h = self.projection(x).view(-1, self.heads, self.width)
        scores = (h * self.source).sum(-1)[sources] + (h * self.target).sum(-1)[targets]
        scores = F.leaky_relu(scores, 0.2)
        index = targets[:, None].expand_as(scores)
        highest = torch.full((len(h), self.heads), -torch.inf).scatter_reduce(0, index, scores.detach(), "amax")
        exponentials = (scores - highest[targets]).exp()
        sums = torch.zeros(len(h), self.heads).scatter_add(0, index, exponentials)
        weights = F.dropout(exponentials / sums[targets], DROPOUT, self.training)
        y = torch.zeros_like(h).index_add(0, targets, h[sources] * weights[..., None])
        return (y.flatten(1) if self.concat else y.mean(1)) + self.bias


class GatherScatterModel(nn.Module):
    """Two layers with ELU between them."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GatherScatterLayer(features, HEADS, WIDTH, concat=True)
        self.last = GatherScatterLayer(HEADS * WIDTH, 1, classes, concat=False)

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        y: Tensor = self.last(F.elu(self.first(x, sources, targets)), sources, targets)
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


def gather_scatter_step(batch: GraphBatch, features: int, classes: int) -> Callable[[], None]:
    nodes = batch.features.shape[1]
    assert batch.columns is not None
    x = torch.zeros(nodes, features).scatter_add_(1, batch.columns[0], batch.features[0])
    edges = torch.cat([batch.edges[0], torch.arange(nodes)[:, None].expand(-1, 2)])
    model = GatherScatterModel(features, classes)

    def loss() -> Tensor:
        return F.cross_entropy(model(x, edges[:, 0], edges[:, 1]), batch.targets[0])

    return training_step(model, loss)


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
    steps = {
        "gat": model_step(mf.build("gat", **keywords), batch),
        "gather-scatter": gather_scatter_step(batch, **keywords),
    }
    times = cpu_milliseconds(steps)
    for name, value in times.items():
        print(f"{name:16} {value:8.1f} ms a step")
    print(f"{'ratio':16} {times['gat'] / times['gather-scatter']:8.2f}")


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
