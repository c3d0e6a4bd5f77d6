"""Longformer's language model with the paper's positions: each layer is the formula within its heads' windows."""

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.nn import Attention
from manyformer.nn.core import Context, ContiguousLayout
from manyformer.nn.ops.static_layout import materialize
from manyformer.nn.positions import TransformerXLPosition
from perturbing import perturb

DIM, HEADS, WIDTH, LENGTH = 12, 3, 4, 70


def by_the_formula(layer: Attention, x: Tensor, windows: list[tuple[int, int]]) -> Tensor:
    """Dai et al. 2019, section 3.3, for each head and each pair within its window of this size and dilation."""
    position = layer.position
    assert isinstance(position, TransformerXLPosition)
    assert layer.q_proj is not None
    q, (k, v) = layer.q_proj(x), layer.kv_proj(x).split(DIM, dim=-1)
    frequencies = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=x.dtype) / DIM)
    outputs = []
    for head, (size, dilation) in enumerate(windows):
        channels = slice(head * WIDTH, (head + 1) * WIDTH)
        u, w = position.biases.u[head], position.biases.v[head]
        rows = []
        for i in range(len(x)):
            keys = [i - dilation * step for step in range(size) if i - dilation * step >= 0]
            distances = torch.tensor([i - j for j in keys], dtype=x.dtype)
            angles = distances[:, None] * frequencies
            projected = position.r_proj(torch.cat([angles.sin(), angles.cos()], dim=-1))[:, channels]
            scores = k[keys, channels] @ (q[i, channels] + u) + projected @ (q[i, channels] + w)
            rows.append((scores / WIDTH**0.5).softmax(0) @ v[keys, channels])
        outputs.append(torch.stack(rows))
    output: Tensor = layer.out_proj(torch.cat(outputs, dim=-1))
    return output


@pytest.mark.parametrize(("number", "windows"), [(0, [(5, 1)] * 3), (3, [(9, 3), (9, 1), (9, 1)])])
def test_a_layer_with_the_papers_positions_is_the_formula(number: int, windows: list[tuple[int, int]]) -> None:
    keywords = {"dim": DIM, "depth": 4, "heads": HEADS, "window": 5, "top_window": 9, "dilated_heads": 1}
    model = mf.build("longformer-lm", vocab=7, dropout=0.0, position="transformer-xl", **keywords)
    layer = perturb(model.get_submodule(f"body.{number}.attention.inner"), 0.3).double()
    assert isinstance(layer, Attention)
    x = torch.randn(LENGTH, DIM, dtype=torch.float64, requires_grad=True)
    outputs = layer(x[None], Context(materialize(ContiguousLayout(), LENGTH))).y[0], by_the_formula(layer, x, windows)
    torch.testing.assert_close(*outputs, atol=1e-6, rtol=0)
    weights = torch.randn_like(outputs[0])
    gradients = (torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()]) for y in outputs)
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_biases_are_shared_by_all_layers() -> None:
    model = mf.build("longformer-lm", vocab=7, dim=DIM, depth=2, heads=HEADS, position="transformer-xl")
    positions = [module for module in model.modules() if isinstance(module, TransformerXLPosition)]
    assert len(positions) == 2
    weights = [list(position.biases.parameters()) for position in positions]
    assert all(first is second for first, second in zip(*weights, strict=True))
