"""Stacks with a rule: plain sums are a chain; rules of several streams, or of all outputs, decode as they train."""

from collections.abc import Callable
from typing import Any, NamedTuple

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
from manyformer.nn.streams import BranchPlace, DepthSkips, StreamLayer, StreamRule, StreamStack

DEPTH = 3


class Streams(NamedTuple):
    """Streams side by side (b, l, n, d)."""

    h: Tensor


class HyperConnections(StreamRule[Streams]):
    """Zhu et al. 2024 (arXiv:2409.19606), static: branch m reads a_m h; h becomes b_m h + c_m y."""

    def __init__(self, streams: int, branches: int) -> None:
        super().__init__()
        self.streams = streams
        self.reads = nn.Parameter(torch.eye(streams).repeat(branches, 1)[:branches])
        self.mixes = nn.Parameter(torch.eye(streams).repeat(branches, 1, 1))
        self.writes = nn.Parameter(torch.ones(branches, streams))

    def start(self, x: Tensor) -> Streams:
        return Streams(x[:, :, None].expand(-1, -1, self.streams, -1))

    def read(self, streams: Streams, place: BranchPlace) -> tuple[Tensor, Streams]:
        number = place.layer * place.branches + place.branch
        mixed = torch.einsum("blnd,nk->blkd", streams.h, self.mixes[number])
        return torch.einsum("blnd,n->bld", streams.h, self.reads[number]), Streams(mixed)

    def write(self, streams: Streams, place: BranchPlace, y: Tensor) -> Streams:
        number = place.layer * place.branches + place.branch
        return Streams(streams.h + self.writes[number][:, None] * y[:, :, None])

    def finish(self, streams: Streams) -> Tensor:
        return streams.h.mean(2)


class AttentionResidual(StreamRule[tuple[Tensor, ...]]):
    """Every branch reads a softmax over the embedding and the outputs of all branches before it."""

    def __init__(self, dim: int, branches: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(branches + 1, dim))

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def read(self, streams: tuple[Tensor, ...], place: BranchPlace) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.mixture(streams), streams

    def write(self, streams: tuple[Tensor, ...], place: BranchPlace, y: Tensor) -> tuple[Tensor, ...]:
        return (*streams, y)

    def finish(self, streams: tuple[Tensor, ...]) -> Tensor:
        return self.mixture(streams)

    def mixture(self, streams: tuple[Tensor, ...]) -> Tensor:
        outputs = torch.stack(streams, 2)
        weights = (outputs @ self.queries[len(streams) - 1]).softmax(-1)
        return (weights[..., None] * outputs).sum(2)


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


@pytest.mark.parametrize("rule", [DepthSkips(DEPTH), HyperConnections(1, 2 * DEPTH), HyperConnections(3, 2 * DEPTH)])
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
        HyperConnections(3, 2 * DEPTH),
        AttentionResidual(16, 2 * DEPTH),
        DepthSkips(DEPTH, from_embedding=True, across=True, backout=True),
    ],
    ids=lambda rule: type(rule).__name__,
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


def test_attention_residuals_of_two_branches_are_what_they_say() -> None:
    rule = AttentionResidual(16, 2)
    parts = layers(StreamLayer)
    stack = StreamStack(rule, **{"0": parts["0"]}).double()
    layer: Any = parts["0"]
    x = torch.randn(1, 6, 16).double()
    ctx = Context(contiguous_positions(1, 0, 6, CPU))
    first = layer.attention.summand(x, ctx).y
    scores = torch.stack([x @ rule.queries[1], first @ rule.queries[1]]).softmax(0)
    second = layer.ff.summand(scores[0][..., None] * x + scores[1][..., None] * first, ctx).y
    last = torch.stack([value @ rule.queries[2] for value in (x, first, second)]).softmax(0)
    expected = sum(weight[..., None] * value for weight, value in zip(last, (x, first, second)))
    torch.testing.assert_close(stack(x, ctx).y, expected, rtol=0, atol=1e-12)


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
