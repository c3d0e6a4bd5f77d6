"""What global tokens get is the same however it is computed: with keys and values of all tokens, of few, or of none."""

import pytest
import torch

from manyformer.models.embedding import positions_of
from manyformer.nn import masks as m
from manyformer.nn.attention.global_local import GlobalLocalAttention
from manyformer.nn.core import PADDING_SEGMENT, Context

DIM, HEADS, LENGTH = 16, 2, 20
SEGMENTS = torch.tensor([[0] * LENGTH, [PADDING_SEGMENT] * 4 + [0] * 9 + [1] * 7, [PADDING_SEGMENT] * LENGTH])


def watched(*_: object) -> None:
    """A watcher wants the weights of all tokens."""


@pytest.mark.parametrize("count", [1, 5, 12])
def test_few_or_all(count: int) -> None:
    """Up to 8 queries are folded into the projections; padding among the first, and rows with fewer than others."""
    torch.manual_seed(0)
    layer = GlobalLocalAttention(DIM, HEADS, m.symmetric_window(3), m.FirstTokens(count) | m.WithRole(1)).double()
    for parameter in layer.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    role = torch.zeros(3, LENGTH, dtype=torch.long)
    role[0, 15] = 1
    place = positions_of(role, SEGMENTS, None)[0]._replace(roles=role)
    x = torch.randn(3, LENGTH, DIM, dtype=torch.float64, requires_grad=True)
    grad_output = torch.randn_like(x) * (SEGMENTS != PADDING_SEGMENT)[..., None]
    actual = []
    for watch in (watched, None):
        context = Context(place) if watch is None else Context(place, watch=watch)
        y = layer(x, context).y
        actual.append([y * (grad_output != 0), *torch.autograd.grad(y, [x, *layer.parameters()], grad_output)])
    for ours, expected in zip(*actual, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)


def test_without_global_tokens() -> None:
    """All parameters still get a gradient."""
    layer = GlobalLocalAttention(DIM, HEADS, m.symmetric_window(3), m.WithRole(1))
    x = torch.randn(1, LENGTH, DIM)
    layer(x, Context(positions_of(torch.zeros(1, LENGTH, dtype=torch.long), None, None)[0])).y.sum().backward()
    assert layer.global_kv_proj.weight.grad is not None
    assert not layer.global_kv_proj.weight.grad.any()
