"""The relevance of heads: conserved from the logit to the embeddings, in every model with rules for its operations.

Kernels and rotations get what the explicit Jacobian of each gives."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.benchmarks import LargestTensorMode
from manyformer.analysis.heads.relevance import (
    head_relevance,
    kernel_relevance,
    layer_relevance,
    recorded_kernels,
    recorded_rotations,
)
from manyformer.analysis.heads.relevance_tape import RelevanceTape
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.nn import Kernel, KernelCall, LinearKernel, LinformerKernel, LSHKernel, PairwiseKernel, SoftmaxKernel
from manyformer.nn.attention.head_gates import attention_heads
from manyformer.nn.core import ContiguousLayout
from manyformer.nn.kernels.pairwise_kernel import DotProductScore, ReluMeanWeights
from manyformer.nn.linear import EluPlusOneFeatures, FavorPlusFeatures
from manyformer.nn.linear.memory_rules import DeltaRule
from manyformer.nn.low_rank.linformer_kernel import LearnedLengthProjection
from manyformer.nn.masks import Causal
from manyformer.nn.ops.static_layout import materialize
from manyformer.nn.positions import (
    AlibiPosition,
    NoPosition,
    Position,
    RotaryPosition,
    ShawPosition,
    T5BiasPosition,
    TransformerXLPosition,
)
from manyformer.recipes.parts.registry import task_of
from perturbing import perturb

TOKENS = torch.tensor([[1, 7, 3, 9, 4, 8]])
MODELS: dict[str, dict[str, Any]] = {
    "transformer-lm": {},
    "transformer-classifier": {},
    "bert": {},
    "transformer": {},
    "transformer ": {"norm_order": "pre"},
    "alibi": {},
    "t5": {},
    "shaw": {},
    "transformer-xl": {},
    "linear-transformer": {},
    "performer": {},
    "roformer": {},
    "llama": {},
}


def tiny(name: str, keywords: dict[str, Any]) -> Any:
    return build_tiny(name.strip(), keywords, 0).double().eval()


@pytest.mark.parametrize("name", MODELS)
def test_relevance_is_conserved(name: str) -> None:
    model = tiny(name, MODELS[name])
    inputs = task_of(model).example(model, TOKENS)
    embedded: list[Tensor] = []
    tape = RelevanceTape()

    def track(module: Any, args: Any, output: Tensor) -> None:
        embedded.append(output)
        tape.track(output)

    for module in model.modules():
        if type(module).__name__ == "TokenEmbedding":
            module.register_forward_hook(track)
    with torch.no_grad(), recorded_kernels(model, tape), recorded_rotations(model, tape), tape:
        logits = task_of(model).call(model, inputs).logits
    relevance = torch.zeros(1, *logits.shape, dtype=torch.float64)
    relevance.view(-1)[int(logits.flatten().argmax())] = 1
    relevances = tape.propagate(logits, relevance)
    total = sum(float(relevances[id(x)].abs().sum()) for x in embedded if id(x) in relevances)
    assert total == pytest.approx(1, abs=1e-9)
    heads = head_relevance(model, inputs)
    assert list(heads) == list(attention_heads(model))
    for name_, part in heads.items():
        assert part.shape == (logits[..., 0].numel(), attention_heads(model)[name_].heads)
        # a branch beside the residual stream has a share of the relevance
        assert bool((part >= 0).all())
        assert bool((part.sum(-1) < 1 + 1e-9).all())
        assert float(part.sum()) > 0
        assert float(layer_relevance(part).max()) <= 1


def test_a_head_without_effect_has_no_relevance() -> None:
    model = tiny("transformer-lm", {})
    layer: Any = next(iter(attention_heads(model).values()))
    with torch.no_grad():
        layer.out_proj.weight[:, : layer.out_proj.in_features // 2] = 0
        layer.out_proj.bias.zero_()
    relevance = head_relevance(model, task_of(model).example(model, TOKENS))
    first = next(iter(relevance.values()))
    assert not first[:, 0].any()
    assert bool((first[:, 1] > 0).all())


def test_a_layer_without_heads_is_a_constant() -> None:
    model = mf.prune_heads(tiny("transformer-lm", {}), {"body.0.attention": [0, 1]})
    relevance = head_relevance(model, task_of(model).example(model, TOKENS))
    assert list(relevance) == ["body.1.attention"]
    assert float(relevance["body.1.attention"].min()) > 0


def test_predictions_are_explained_in_any_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("transformer", {})
    inputs = task_of(model).example(model, TOKENS)
    expected = head_relevance(model, inputs)
    monkeypatch.setattr("manyformer.analysis.heads.relevance.TARGETS_PER_PASS", 1)
    monkeypatch.setattr("manyformer.analysis.heads.relevance_tape.MAX_IMPACTS", 1)
    for part, relevance in head_relevance(model, inputs).items():
        torch.testing.assert_close(relevance, expected[part])


def test_memory_is_linear_in_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyformer.analysis.heads.relevance_tape.MAX_IMPACTS", 1)
    monkeypatch.setattr("manyformer.analysis.heads.relevance_tape.MAX_IMPACTS", 1 << 12)
    sizes = []
    for length in (16, 48):
        model = build_tiny("transformer-lm", {"depth": 1}, 0).eval()
        with LargestTensorMode() as mode:
            head_relevance(model, task_of(model).example(model, torch.full((1, length), 3)))
        sizes.append(mode.elements)
    assert sizes[1] <= 3.1 * sizes[0]


def test_every_recipe_has_relevance_or_a_sentence() -> None:
    explained = []
    for name in mf.recipes():
        model = build_tiny(name, {"depth": 1} if name in MODELS else {}, 0)
        if attention_heads(model):
            with suppress(UserError):
                head_relevance(model, task_of(model).example(model, TOKENS))
                explained.append(name)
    expected = {"transformer", "transformer-lm", "bert", "roformer", "sparse-transformer", "bigbird", "vit", "llama"}
    expected |= {"alibi", "t5", "shaw", "transformer-xl", "linear-transformer", "performer", "rfa", "linformer"}
    assert expected | {"audio-transformer-classifier", "captioner"} <= set(explained)
    assert not {"reformer", "routing-transformer", "universal-transformer-lm"} & set(explained)


def test_operations_without_a_rule_are_refused_by_name() -> None:
    tape = RelevanceTape()
    x = torch.ones(2, 3)
    tape.track(x)
    with tape, pytest.raises(UserError, match="relevance has no rule for the operation softmax"):
        F.softmax(x, -1)
    fnet = build_tiny("fnet", {}, 0)
    example = task_of(fnet).example(fnet, TOKENS)
    with pytest.raises(UserError, match="fnet has no attention heads"):
        head_relevance(fnet, example)


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
    monkeypatch.setattr("manyformer.analysis.heads.relevance.MAX_IMPACTS", impacts)
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
