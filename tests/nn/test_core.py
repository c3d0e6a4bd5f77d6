"""The protocol: chains, layers beside each other, residual branches, states as trees."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from manyformer.models.embedding import positions_of
from manyformer.nn import Attention, ParallelLayers, SoftmaxKernel
from manyformer.nn.core import (
    Chain,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    PackedLayout,
    Pointwise,
    State,
    TokenPositions,
    tree_map,
)
from manyformer.nn.masks import Causal
from manyformer.nn.residual import AddJoin, Residual

CPU = torch.device("cpu")


class Counting(Layer):
    """Adds how often it was called on this state, and costs as much."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return torch.zeros(batch, device=device, dtype=dtype)

    def forward(self, x: Tensor, ctx: Context, state: State = None) -> LayerOutput:
        if state is None:
            return LayerOutput(x + self.weight, None, self.weight)
        return LayerOutput(x + self.weight * (state + 1)[:, None, None], state + 1, self.weight)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Cup(NamedTuple):
    full: Tensor
    size: int | None = None


@pytest.fixture
def ctx() -> Context:
    return Context(TokenPositions(torch.arange(3)[None], torch.zeros(1, 3, dtype=torch.long), ContiguousLayout()))


def test_chain_goes_in_order_and_names_its_parameters(ctx: Context) -> None:
    chain = Chain(first=Pointwise(nn.Linear(2, 3)), second=Pointwise(Times(10.0)), third=Counting(1.0))
    assert [name for name, _ in chain.named_parameters()] == ["first.inner.weight", "first.inner.bias"]
    x = torch.randn(1, 3, 2)
    out = chain(x, ctx)
    torch.testing.assert_close(out.y, nn.functional.linear(x, *chain.parameters()) * 10 + 1)
    assert out.state is None


def test_chain_threads_states_and_sums_losses(ctx: Context) -> None:
    chain = Chain(a=Counting(1.0), b=Pointwise(nn.Identity()), c=Counting(0.25))
    state = chain.init_state(2, device=CPU, dtype=torch.float64)
    x = torch.zeros(2, 3, 4, dtype=torch.float64)
    once = chain(x, ctx, state)
    twice = chain(x, ctx, once.state)
    assert once.loss == twice.loss == 1.25
    assert (once.y == 1.25).all()
    assert (twice.y == 2.5).all()
    # the state that was given is as it was: a caller may go back to it
    assert (state[0] == 0).all()
    assert (chain(x, ctx, state).y == 1.25).all()


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ({}, 1 + 1.5),
        ({"pre_norm": Times(3.0)}, 1 + 3.5),
        ({"inner_norm": Times(3.0)}, 1 + 4.5),
        ({"post_norm": Times(3.0)}, 3 * 2.5),
        ({"pre_norm": Times(3.0), "inner_norm": Times(5.0), "post_norm": Times(7.0)}, 7 * (1 + 5 * 3.5)),
    ],
)
def test_residual_places_norms(ctx: Context, norms: dict[str, Any], expected: float) -> None:
    out = Residual(Counting(0.5), **norms)(torch.ones(1, 3, 2), ctx)
    assert (out.y == expected).all()
    assert out.loss == 0.5


def test_residual_passes_state_on(ctx: Context) -> None:
    layer = Residual(Counting(0.5))
    state = layer.init_state(1, device=CPU, dtype=torch.float32)
    out = layer(torch.ones(1, 3, 2), ctx, layer(torch.ones(1, 3, 2), ctx, state).state)
    assert (out.y == 3.0).all()
    assert (out.state == 2).all()


def test_dropout_acts_on_the_branch_and_in_training_only() -> None:
    add, x, branch = AddJoin(dropout=0.5), torch.zeros(100, 3, 7), torch.ones(100, 3, 7)
    y = add.train()(x + 10, branch)
    assert set(y.unique().tolist()) == {10.0, 12.0}
    assert abs((y == 12).float().mean().item() - 0.5) < 0.05
    assert (add.eval()(x + 10, branch) == 11).all()


def test_tree_map_touches_tensors_only_and_keeps_the_shape_of_the_tree() -> None:
    tree: Any = [Cup(torch.ones(2), 3), {"a": (torch.zeros(1), None), "b": 0.5}, "text"]
    mapped = tree_map(lambda t: t + 1, tree)
    assert isinstance(mapped[0], Cup)
    assert mapped[0].full.tolist() == [2.0, 2.0]
    assert mapped[0].size == 3
    assert mapped[1]["a"][0].tolist() == [1.0]
    assert mapped[1]["a"][1] is None
    assert mapped[1]["b"] == 0.5
    assert mapped[2] == "text"
    assert tree[0].full.tolist() == [1.0, 1.0]


def test_tree_map_of_two_trees_needs_trees_of_one_form() -> None:
    first, second = Cup(torch.ones(2), 3), Cup(torch.full((2,), 5.0), 3)
    assert tree_map(torch.add, [first, None], [second, None])[0].full.tolist() == [6.0, 6.0]
    with pytest.raises(ValueError, match="equal but for their tensors, got 3 and int"):
        tree_map(torch.add, first, second._replace(size=4))
    with pytest.raises(ValueError, match="got None and Tensor"):
        tree_map(torch.add, [None], [torch.ones(2)])


@pytest.mark.parametrize(
    ("documents", "right"),
    [(((0, 0, 5), (1, 0, 2)), True), (((0, 0, 5), (1, 1, 2)), False), (((0, 0, 2), (0, 2, 5)), False), ((), True)],
)
def test_what_counts_as_padding_on_the_right(documents: tuple[tuple[int, int, int], ...], right: bool) -> None:
    assert PackedLayout(documents).right_padded is right


def test_heads_beside_each_other_are_one_attention() -> None:
    full = Attention(12, 3, SoftmaxKernel(Causal()), bias=False)
    one, two = (Attention(12, heads, SoftmaxKernel(Causal()), head_dim=4, value_dim=4, bias=False) for heads in (1, 2))
    with torch.no_grad():
        for part, rows in ((one, slice(0, 4)), (two, slice(4, 12))):
            part.q_proj.weight.copy_(full.q_proj.weight[rows])
            keys, values = full.kv_proj.weight.chunk(2)
            part.kv_proj.weight.copy_(torch.cat([keys[rows], values[rows]]))
            part.out_proj.weight.copy_(full.out_proj.weight[:, rows])
    both = ParallelLayers(one=one, two=two)
    tokens = torch.zeros(2, 7, dtype=torch.long)
    x, ctx = torch.randn(2, 7, 12), Context(positions_of(tokens, None, None)[0])
    torch.testing.assert_close(both(x, ctx).y, full(x, ctx).y)
    state = both.init_state(2, device=x.device, dtype=x.dtype)
    y, state, _ = both(x, ctx, state)
    assert [kept.source.length for kept in state] == [7, 7]
    torch.testing.assert_close(y, full(x, ctx).y)
