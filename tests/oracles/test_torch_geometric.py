"""`gat`, GATv2 and `gcn` against the layers of torch_geometric with the same weights, gradients too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import manyformer as mf

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
NODES, FEATURES, DIM, HEADS, CLASSES = 40, 12, 16, 4, 3


def drawn_graph() -> tuple[Tensor, Tensor]:
    """Features, and edges (2, e) in both directions, some nodes with none."""
    edges = torch.randint(NODES - 3, (2, 100))
    edges = torch.cat([edges, edges.flip(0)], 1).unique(dim=1)
    return torch.randn(NODES, FEATURES, dtype=torch.float64, requires_grad=True), edges[:, edges[0] != edges[1]]


def compare(model: Any, layers: Any, activation: Any, copied: dict[Tensor, Tensor]) -> None:
    """Copy our parameters to theirs, and compare logits and the gradients of the features."""
    x, edges = drawn_graph()
    with torch.no_grad():
        for reference, ours in copied.items():
            ours.normal_()
            reference.copy_(ours.view_as(reference))
    expected = layers[1](activation(layers[0](x, edges)), edges)
    logits = model(x[None], edges.t()[None]).logits[0]
    torch.testing.assert_close(logits, expected)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (logits, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("scores", ["additive", "dynamic"])
def test_gat(scores: str) -> None:
    nn = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is missing: pip install 'manyformer[test]'")
    sizes = {"features": FEATURES, "classes": CLASSES, "dim": DIM, "heads": HEADS, "dropout": 0.0}
    model: Any = mf.build("gat", scores=scores, **sizes).double().eval()
    kind = {"additive": nn.GATConv, "dynamic": nn.GATv2Conv}[scores]
    options: dict[str, Any] = {} if scores == "additive" else {"bias": True}
    layers = [
        kind(FEATURES, DIM // HEADS, heads=HEADS, **options).double(),
        kind(DIM, CLASSES, heads=1, concat=False, **options).double(),
    ]
    projections = [model.embed.weight.t(), model.body.projection_1.inner[2].weight]
    copied: dict[Tensor, Tensor] = {}
    for reference, ours, projection in zip(layers, [model.body.attention_0, model.body.attention_1], projections):
        copied[reference.bias] = ours.bias
        if scores == "additive":
            copied |= {reference.lin.weight: projection, reference.att_src: ours.scores.source}
            copied[reference.att_dst] = ours.scores.target
        else:
            # ours has, for each head, the rows of the target and then those of the source
            by_head = projection.unflatten(0, (reference.heads, 2, -1))
            with torch.no_grad():
                reference.lin_r.weight.copy_(by_head[:, 0].flatten(0, 1))
                reference.lin_l.weight.copy_(by_head[:, 1].flatten(0, 1))
                reference.lin_l.bias.zero_(), reference.lin_r.bias.zero_()
            copied[reference.att] = ours.scores.vector
    compare(model, layers, F.elu, copied)


def test_gcn() -> None:
    nn = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is missing: pip install 'manyformer[test]'")
    model: Any = mf.build("gcn", features=FEATURES, classes=CLASSES, dim=DIM, dropout=0.0).double().eval()
    layers = [nn.GCNConv(FEATURES, DIM).double(), nn.GCNConv(DIM, CLASSES).double()]
    projections = [model.embed.weight.t(), model.body.projection_1.inner[2].weight]
    copied = {reference.lin.weight: ours for reference, ours in zip(layers, projections)}
    compare(model, layers, F.relu, copied)
