"""Relevance of kernels with terms in their scores, without softmax, and of rotations: the explicit Jacobian of each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyformer.core import ContiguousLayout
from manyformer.errors import UserError
from manyformer.kernels import (
    Kernel,
    KernelCall,
    LinearKernel,
    LinformerKernel,
    LSHKernel,
    PairwiseKernel,
    SoftmaxKernel,
)
from manyformer.kernels.features import EluPlusOneFeatures, FavorPlusFeatures
from manyformer.kernels.linformer_kernel import LearnedLengthProjection
from manyformer.kernels.memory_rules import DeltaRule
from manyformer.kernels.pairwise_kernel import DotProductScore, ReluMeanWeights
from manyformer.masks import Causal
from manyformer.ops.static_layout import materialize
from manyformer.position import (
    AlibiPosition,
    NoPosition,
    Position,
    RotaryPosition,
    ShawPosition,
    T5BiasPosition,
    TransformerXLPosition,
)
from manyformer.relevance.kernel_rule import kernel_relevance, recorded_kernels, recorded_rotations
from manyformer.relevance.relevance_tape import RelevanceTape
from perturbing import perturb

EPSILON = 1e-5
HEADS, LENGTH, WIDTH = 2, 4, 4

CASES: dict[str, tuple[Callable[[], Kernel], Callable[[], Position]]] = {
    "alibi": (lambda: SoftmaxKernel(Causal()), lambda: AlibiPosition(HEADS)),
    "t5": (SoftmaxKernel, lambda: T5BiasPosition(HEADS)),
    "shaw": (SoftmaxKernel, lambda: ShawPosition(WIDTH, clip=2)),
    "transformer-xl": (lambda: SoftmaxKernel(Causal()), lambda: TransformerXLPosition(8, HEADS, width=WIDTH)),
    "linear": (lambda: LinearKernel(EluPlusOneFeatures(), Causal()), NoPosition),
    "linear to both sides": (lambda: LinearKernel(EluPlusOneFeatures()), NoPosition),
    "favor": (lambda: LinearKernel(FavorPlusFeatures(WIDTH, 6)), NoPosition),
    "delta": (lambda: LinearKernel(EluPlusOneFeatures(), Causal(), rule=DeltaRule()), NoPosition),
    "relu": (lambda: PairwiseKernel(DotProductScore(), ReluMeanWeights(), Causal()), NoPosition),
    "linformer": (lambda: LinformerKernel(LearnedLengthProjection(8, 2)), NoPosition),
}


def explicit(function: Callable[..., Tensor], relevance: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The relevance of the inputs of one sample, by the full matrix of impacts of all inputs on all outputs."""
    jacobians = torch.autograd.functional.jacobian(function, inputs)
    zero = function(*(torch.zeros_like(x) for x in inputs)).flatten()
    impacts = torch.cat([j.reshape(len(zero), -1) * x.flatten() for j, x in zip(jacobians, inputs)], 1)
    impacts = impacts + zero[:, None] / impacts.shape[1]
    positive, negative = impacts.clamp(min=0), impacts.clamp(max=0)
    shares = positive / (positive.sum(1, keepdim=True) + EPSILON) / 2
    shares = shares + negative / (negative.sum(1, keepdim=True) - EPSILON) / 2
    result = relevance.flatten() @ shares
    result = result * relevance.abs().sum() / result.abs().sum()
    return [part.view_as(x) for part, x in zip(result.split([x.numel() for x in inputs]), inputs)]


def make_call(name: str, key_heads: int = HEADS) -> tuple[Kernel, KernelCall]:
    make_kernel, make_position = CASES[name]
    kernel, position = (perturb(module, 0.5).double().eval() for module in (make_kernel(), make_position()))
    places = materialize(ContiguousLayout(), LENGTH)
    q = torch.randn(1, HEADS, LENGTH, WIDTH + kernel.extra_query_dim).double()
    k = torch.randn(1, key_heads, LENGTH, WIDTH).double()
    v = torch.randn(1, key_heads, LENGTH, WIDTH + kernel.gate_dim).double()
    return kernel, KernelCall(q, k, v, places, places, position)


@pytest.mark.parametrize("impacts", [1, 1 << 22], ids=["one output at a time", "all at once"])
@pytest.mark.parametrize("name", CASES)
def test_each_head_gets_what_the_explicit_jacobian_gives(
    name: str, impacts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyformer.relevance.kernel_rule.MAX_IMPACTS", impacts)
    kernel, call = make_call(name)
    relevance = torch.stack([torch.rand(1, HEADS, LENGTH, WIDTH), torch.randn(1, HEADS, LENGTH, WIDTH)]).double()
    parts = kernel_relevance(relevance, kernel, call)
    inputs = call.q, call.k, call.v
    for head in range(HEADS):

        def run(*arguments: Tensor, head: int = head) -> Tensor:
            """The outputs of one head; those of the others do not matter."""
            q, k, v = (
                torch.cat([x[0, :head], argument[None], x[0, head + 1 :]])[None]
                for x, argument in zip(inputs, arguments)
            )
            return kernel(call._replace(q=q, k=k, v=v)).y[0, head]

        for target in range(2):
            expected = explicit(run, relevance[target, 0, head], tuple(x[0, head] for x in inputs))
            for part, full in zip(expected, parts):
                torch.testing.assert_close(full[target, 0, head], part, rtol=1e-5, atol=1e-9)
    kept = sum(part.abs().sum((1, 2, 3, 4)) for part in parts)
    torch.testing.assert_close(kept, relevance.abs().sum((1, 2, 3, 4)))


@pytest.mark.parametrize("name", ["alibi", "linear"])
def test_heads_that_share_keys_add_their_relevance(name: str) -> None:
    kernel, call = make_call(name, key_heads=1)
    relevance = torch.rand(1, 1, HEADS, LENGTH, WIDTH).double()
    copied = call._replace(**{part: getattr(call, part).repeat_interleave(HEADS, 1) for part in "kv"})
    shared, copies = kernel_relevance(relevance, kernel, call), kernel_relevance(relevance, kernel, copied)
    torch.testing.assert_close(shared[0], copies[0])
    for part, expected in zip(shared[1:], copies[1:]):
        torch.testing.assert_close(part, expected.sum(2, keepdim=True))


@pytest.mark.parametrize("pairs", ["interleaved", "halves"])
def test_a_rotation_passes_relevance_on_by_its_matrix(pairs: Any) -> None:
    position = RotaryPosition(WIDTH, pairs=pairs, rotated=2).double()
    x, places = torch.randn(1, HEADS, LENGTH, WIDTH).double(), materialize(ContiguousLayout(), LENGTH)
    tape = RelevanceTape()
    tape.track(x)
    with torch.no_grad(), recorded_rotations(position, tape), tape:
        y = position.query(x, places)
    relevance = torch.randn(1, *y.shape).double()
    result = tape.propagate(y, relevance)[id(x)]
    for head in range(HEADS):
        for token in range(LENGTH):

            def rotate(row: Tensor, token: int = token) -> Tensor:
                rows = torch.cat([x[0, 0, :token], row[None], x[0, 0, token + 1 :]])
                return position.query(rows[None, None], places)[0, 0, token]

            [expected] = explicit(rotate, relevance[0, 0, head, token], (x[0, head, token],))
            torch.testing.assert_close(result[0, 0, head, token], expected, rtol=1e-5, atol=1e-9)
    assert torch.equal(position.query(x, places), y)


def test_choices_by_content_are_refused() -> None:
    kernel, (_, call) = LSHKernel(num_buckets=2, chunk_length=4, num_hashes=1), make_call("linear")
    model, tape = nn.ModuleDict({"attention": kernel}), RelevanceTape()
    with (
        recorded_kernels(model, tape),
        pytest.raises(UserError, match=r"no rule for LSHKernel \(attention\), which chooses"),
    ):
        kernel(call._replace(q=call.k))
