"""Stacks with a rule: plain sums are a chain; rules of several streams, or of all outputs, decode as they train."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Chain, Context, ContiguousLayout, Layer, Pointwise, TokenPositions, contiguous_positions
from manyformer.nn.decoding.bound_step import bind_step
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Causal
from manyformer.nn.residual import AddJoin, Residual
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.nn.streams import (
    AttentionResiduals,
    DepthSkips,
    DynamicConnection,
    HyperConnections,
    ManifoldConnection,
    ManifoldHead,
    StaticConnection,
    StreamLayer,
    StreamRule,
    StreamStack,
    UnmixedConnection,
)

DEPTH = 3
BRANCHES = (2,) * DEPTH


def layers(kind: type[Chain] | type[StreamLayer]) -> dict[str, Layer]:
    """The same layers for a chain and for a stack with a rule."""
    torch.manual_seed(0)
    branches_made: dict[str, Layer] = {}
    for number in range(DEPTH):
        attention = Attention(16, 2, SoftmaxKernel(Causal()))
        branches_made[str(number)] = kind(
            attention=Residual(attention, pre_norm=nn.LayerNorm(16), join=AddJoin(dropout=0.0, scale=0.5)),
            ff=Residual(FeedForward(16), pre_norm=nn.LayerNorm(16), inner_norm=nn.LayerNorm(16)),
        )
    branches_made["norm"] = Pointwise(nn.LayerNorm(16))
    return branches_made


def call(stack: Layer) -> Tensor:
    return stack(torch.linspace(-1, 1, 96).view(1, 6, 16).sin().double(), Context(contiguous_positions(1, 0, 6, CPU))).y


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "rule",
    [
        DepthSkips(DEPTH),
        HyperConnections(1, BRANCHES, partial(StaticConnection, 1)),
        HyperConnections(3, BRANCHES, partial(StaticConnection, 3)),
        HyperConnections(3, BRANCHES, partial(DynamicConnection, 16, 3)),
    ],
    ids=str,
)
def test_rules_that_begin_as_plain_sums_equal_a_chain(rule: StreamRule[Any]) -> None:
    chain = Chain(**layers(Chain)).double()
    stack = StreamStack(rule, **layers(StreamLayer)).double()
    assert {name for name, _ in stack.named_parameters() if not name.startswith("rule")} == {
        name for name, _ in chain.named_parameters()
    }
    torch.testing.assert_close(call(stack), call(chain), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "rule",
    [
        HyperConnections(3, BRANCHES, partial(StaticConnection, 3)),
        HyperConnections(3, BRANCHES, partial(DynamicConnection, 16, 3)),
        HyperConnections(3, BRANCHES, partial(ManifoldConnection, 16, 3), ManifoldHead(16, 3)),
        HyperConnections(3, BRANCHES, partial(UnmixedConnection, 16, 3), ManifoldHead(16, 3)),
        AttentionResiduals(16, BRANCHES),
        AttentionResiduals(16, BRANCHES, block_layers=2),
        DepthSkips(DEPTH, from_embedding=True, across=True, backout=True),
    ],
    ids=str,
)
def test_any_rule_decodes_one_token_at_a_time(rule: StreamRule[Any]) -> None:
    """All state is that of the branches; the bound step and `forward` with a state give what one pass gives."""
    stack = StreamStack(rule, **layers(StreamLayer)).double().eval()
    with torch.no_grad():
        for weight in rule.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
        whole = call(stack)
        x = torch.linspace(-1, 1, 96).view(1, 6, 16).sin().double()
        for step in (bind_step(stack), lambda *inputs: stack(*inputs)[:2]):
            state = stack.init_state(1, device=CPU, dtype=torch.double)
            assert [len(part) for part in state] == [2] * DEPTH
            outputs = []
            for place in range(6):
                positions = TokenPositions(torch.tensor([[place]]), torch.tensor([[0]]), ContiguousLayout(place))
                y, state = step(x[:, place : place + 1], Context(positions), state)
                outputs.append(y)
            torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=0, atol=1e-12)


def post_norm_branch() -> Layer:
    return StreamLayer(ff=Residual(FeedForward(16), post_norm=nn.LayerNorm(16)))


def stack_of(**further: Layer) -> Layer:
    parts = layers(StreamLayer)
    return StreamStack(DepthSkips(1), **{"0": parts["0"], **further})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (post_norm_branch, "norms must be inside"),
        (lambda: stack_of(**{"1": FeedForward(16)}), "must be a StreamLayer"),
        (lambda: stack_of(mixer=Attention(16, 2, SoftmaxKernel(Causal()))), "must be position-wise"),
        (lambda: stack_of(norm=Pointwise(nn.LayerNorm(16)), **{"1": layers(StreamLayer)["1"]}), "follow one another"),
    ],
)
def test_layers_that_no_rule_can_be_put_around_are_refused(make: Callable[[], Layer], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()
