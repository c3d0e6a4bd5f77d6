"""Reversible stacks, also with encoder: the gradients of ordinary ones, with dropout and choices, and nothing kept."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.models import EncoderDecoder
from manyformer.nn.batches import CausalLMBatch, Seq2SeqBatch
from manyformer.nn.core import (
    Chain,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    MemorySequence,
    State,
    TokenPositions,
)
from manyformer.nn.depth import ReversibleStack
from manyformer.nn.feed_forward.feedforward import ChunkedLayer, FeedForward
from manyformer.nn.ops.static_layout import materialize
from manyformer.nn.residual import AddJoin, Residual
from manyformer.nn.runtime.recompute import choose_once, recording_choices, replaying_choices
from manyformer.training.layers import checkpoint_activations
from perturbing import perturb


def watch(module: nn.Module, name: str, value: Tensor) -> None:
    """Somebody watches, so that activations are kept as usual."""


def context(length: int, **more: Any) -> Context:
    pos = torch.arange(length)[None]
    return Context(TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout()), **more)


class Rounded(Layer):
    """A layer with a choice that the last bits decide, and with a loss."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.way, self.made = nn.Linear(dim, dim, bias=False), 0

    def forward(self, x: Tensor, ctx: Context, state: State = None) -> LayerOutput:
        def choose() -> Tensor:
            self.made += 1
            return (x.detach() * 1e6).round() % 2

        y = self.way(x)
        return LayerOutput(y * choose_once(choose), state, y.square().mean())


def stack(dim: int, depth: int, dropout: float) -> ReversibleStack:
    def layer() -> Chain:
        parts = {"mix": Rounded(dim), "ff": FeedForward(dim, 2 * dim)}
        return Chain(
            **{
                name: Residual(part, pre_norm=nn.LayerNorm(dim), join=AddJoin(dropout=dropout))
                for name, part in parts.items()
            }
        )

    return ReversibleStack(**{str(number): layer() for number in range(depth)})


def gradients(body: ReversibleStack, x: Tensor, ctx: Context) -> list[Tensor]:
    torch.manual_seed(5)
    out = body(x, ctx)
    loss = out.y.pow(3).sum() + 3 * out.loss + torch.rand(())
    return [out.y, torch.as_tensor(out.loss), *torch.autograd.grad(loss, [x, *body.parameters()])]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_gradients_are_the_ordinary_ones(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    body = stack(8, 6, 0.2).to(dtype).train()
    x = torch.randn(2, 5, 8, dtype=dtype, requires_grad=True)
    for actual, expected in zip(
        gradients(body, x, context(5)), gradients(body, x, context(5, watch=watch)), strict=True
    ):
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()
    # each choice was made once for either, and never again for a gradient
    assert all(part.made == 2 for part in body.modules() if isinstance(part, Rounded))


def test_random_numbers_go_on_as_if_nothing_was_computed_twice() -> None:
    body = stack(4, 2, 0.5).train()
    x = torch.randn(1, 3, 4, requires_grad=True)
    actual = []
    for ctx in (context(3), context(3, watch=watch)):
        gradients(body, x, ctx)
        actual.append(torch.rand(4))
    assert torch.equal(*actual)


def test_weights_that_are_frozen_and_inputs_that_need_nothing() -> None:
    body = stack(4, 2, 0.0)
    weights = list(body.parameters())
    weights[0].requires_grad = False
    body(torch.randn(1, 3, 4), context(3)).y.sum().backward()  # type: ignore[no-untyped-call]
    assert weights[0].grad is None
    assert all(weight.grad is not None for weight in weights[1:-1])


def kept(residual: str, depth: int) -> int:
    """Numbers that autograd keeps between forward and backward."""
    model = mf.build("compose", vocab=11, dim=16, depth=depth, heads=2, residual_streams=residual)
    weights = {weight.data_ptr() for weight in model.parameters()}
    count = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal count
        count += 0 if x.data_ptr() in weights else x.numel()
        return x

    tokens = torch.randint(11, (2, 64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.loss(CausalLMBatch(tokens, tokens))
    return count


def test_what_is_kept_does_not_grow_with_depth() -> None:
    assert kept("reversible", 8) == kept("reversible", 2)
    assert kept("plain", 8) > 3 * kept("plain", 2)


@pytest.mark.parametrize("words", [{}, {"kernel": "linear"}, {"kernel": "lsh", "position": "rope"}, {"position": "t5"}])
def test_any_parts_may_be_reversible(words: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = mf.build(
        "compose", vocab=11, dim=16, depth=3, heads=2, residual_streams="reversible", ff_chunk=5, dropout=0.1, **words
    ).double()
    tokens = torch.randint(11, (2, 13))
    actual = []
    for watched in (False, True):
        torch.manual_seed(1)
        logits = model(tokens, **({"watch": watch} if watched else {})).logits
        actual.append(torch.autograd.grad(logits.pow(2).sum(), list(model.parameters())))
    for gradient, expected in zip(*actual):
        assert (gradient - expected).abs().max() <= 1e-9 * (1 + expected.abs().max())


def test_a_source_gets_its_gradient() -> None:
    """Cross-attention in a branch: what it attends to is an input, too."""
    from manyformer.nn import Attention, SoftmaxKernel
    from manyformer.nn.attention.kv_cache import CrossAttentionSource
    from manyformer.nn.core import MemorySequence

    torch.manual_seed(0)
    layers = {"cross": Attention(8, 2, SoftmaxKernel(), source=CrossAttentionSource()), "ff": FeedForward(8)}
    body = ReversibleStack(**{"0": Chain(**{name: Residual(part) for name, part in layers.items()})}).double()
    source, x = (torch.randn(1, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    actual = []
    for more in ({}, {"watch": watch}):
        ctx = context(4, memory=MemorySequence(source, context(4).positions), **more)
        actual.append(torch.autograd.grad(body(x, ctx).y.pow(2).sum(), [source, x, *body.parameters()]))
    for gradient, expected in zip(*actual):
        assert (gradient - expected).abs().max() < 1e-12


def test_what_cannot_be_taken_back_is_refused() -> None:
    with pytest.raises(ValueError, match="norm_order='pre' or 'sandwich'"):
        mf.build("compose", vocab=11, dim=16, depth=1, heads=2, residual_streams="reversible", norm_order="post")
    with pytest.raises(UserError, match="stores no activations"):
        checkpoint_activations(mf.build("compose", vocab=11, dim=16, depth=1, heads=2, residual_streams="reversible"))


def test_choices_are_made_once() -> None:
    numbers = iter(range(10))
    assert choose_once(lambda: next(numbers)) == 0
    tape: list[Any] = []
    with recording_choices(tape):
        first = [choose_once(lambda: next(numbers)) for _ in range(2)]
    with replaying_choices(tape):
        assert [choose_once(lambda: next(numbers)) for _ in range(2)] == first == [1, 2]
    assert choose_once(lambda: next(numbers)) == 3


def test_a_feed_forward_in_pieces() -> None:
    torch.manual_seed(0)
    full = FeedForward(6).double()
    x = torch.randn(2, 11, 6, dtype=torch.float64, requires_grad=True)
    actual = []
    for layer in (full, ChunkedLayer(full, 4)):
        y = layer(x, context(11)).y
        actual.append([y, *torch.autograd.grad(y.pow(2).sum(), [x, *full.parameters()])])
    for gradient, expected in zip(*actual):
        assert (gradient - expected).abs().max() < 1e-12
    with pytest.raises(ValueError, match="may mix tokens"):
        ChunkedLayer(Rounded(4), 2)


@pytest.mark.parametrize("trains", [False, True])
def test_both_streams_side_by_side(trains: bool) -> None:
    reversible = stack(8, 3, 0.0)
    layers: dict[str, Any] = dict(reversible.named_children())
    both, x = ReversibleStack("concat", **layers), torch.randn(1, 6, 8)
    with torch.set_grad_enabled(trains):
        streams = both(x, context(6)).y.chunk(2, -1)
        torch.testing.assert_close((streams[0] + streams[1]) / 2, reversible(x, context(6)).y)
    assert not torch.equal(*streams)


def test_a_grid_allows_as_many_tokens_as_it_has_cells() -> None:
    sizes: dict[str, Any] = {"dim": 16, "heads": 2, "depth": 1, "position": "axial"}
    assert mf.build("reformer", max_length=24, **sizes).max_length == 24
    assert mf.build("reformer", max_length=15, axial_rows=3, axial_row_dim=4, **sizes).max_length == 15
    with pytest.raises(UserError, match=r"axial_rows \(4\) needs position=axial, and must divide max_length \(15\)"):
        mf.build("reformer", max_length=15, axial_rows=4, **sizes)
    with pytest.raises(UserError, match="output is concat, and residual_streams=plain"):
        mf.build("reformer", vocab=9, output="concat", **{**sizes, "max_length": 24, "residual_streams": "plain"})


SIZES = {"vocab": 11, "dim": 16, "depth": 3, "heads": 2, "ff_dim": 24, "dropout": 0.0}


def two_streams(stack: Chain, x: Tensor, ctx: Context) -> Tensor:
    """y1 = x1 + F(x2), x1 and x2 exchanged, for each branch in turn (Kitaev et al. 2020, section 3, with storage)."""
    first = second = x
    layers = stack.get_submodule("layers")
    assert isinstance(layers, ReversibleStack)
    for layer in layers.children():
        for branch in layer.children():
            module: Any = branch
            first, second = second, first + module.inner(module.pre_norm(second), ctx).y
    output: Tensor = stack.get_submodule("norm")((first + second) / 2, ctx).y
    return output


def by_hand(model: EncoderDecoder, source: Tensor, target: Tensor) -> Tensor:
    places = [materialize(ContiguousLayout(), x.shape[1]) for x in (source, target)]
    assert isinstance(model.encoder, Chain)
    assert isinstance(model.decoder, Chain)
    encoded = two_streams(model.encoder, model.embed_source(source, places[0]), Context(places[0]))
    ctx = Context(places[1], MemorySequence(encoded, places[0]))
    decoded = two_streams(model.decoder, model.embed_target(target, places[1]), ctx)
    logits: Tensor = model.head(decoded)
    return logits


@pytest.mark.parametrize("keywords", [{}, {"kernel": "lsh", "num_buckets": 2, "chunk_length": 4}, {"ff_chunk": 3}])
def test_outputs_and_gradients_are_those_of_two_stored_streams(keywords: dict[str, Any]) -> None:
    model = perturb(mf.build("reformer-seq2seq", **SIZES, **keywords), 0.1).double().eval()
    source, target = torch.randint(1, 11, (2, 9)), torch.randint(1, 11, (2, 7))
    weights = torch.randn(2, 7, 11, dtype=torch.float64)
    gradients = []
    for logits in (model(source, target).logits, by_hand(model, source, target)):
        parameters = list(model.parameters())
        gradients.append([logits, *torch.autograd.grad((logits * weights).sum(), parameters)])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)


def test_no_activations_of_branches_are_stored() -> None:
    def stored(streams: str, depth: int) -> int:
        model = mf.build("reformer-seq2seq", **SIZES | {"depth": depth}, residual_streams=streams)
        batch = Seq2SeqBatch(*(torch.randint(1, 11, (2, 30)) for _ in range(3)))
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.data_ptr()] = x.numel()
            return x

        weights = {parameter.data_ptr() for parameter in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model.loss(batch)
        return sum(size for pointer, size in sizes.items() if pointer not in weights)

    assert stored("reversible", 6) == stored("reversible", 1)
    assert stored("plain", 6) > 4 * stored("plain", 1)
