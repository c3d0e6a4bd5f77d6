"""Gates on heads: 0 removes a head as zero columns of the output projection do, in every recipe and in decoding."""

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.contracts.trial import ContractTrial
from manyformer.analysis.own_models import OwnSubject, build_tiny
from manyformer.models.tasks import Inputs
from manyformer.nn.attention.attention import MultiHeadLayer
from manyformer.nn.attention.head_gates import ConstantGates, attention_heads, gated_heads
from manyformer.recipes import RECIPES

WITHOUT_HEADS = {name for name, recipe in RECIPES.items() if "heads" in recipe.card.reasons}


def subject_and_inputs(recipe: str) -> tuple[OwnSubject, Inputs]:
    """A tiny model in float64 and evaluation mode, with inputs of two rows."""
    subject = OwnSubject(build_tiny(recipe, {}, 0).double().eval())
    trial = ContractTrial(subject, torch.Generator().manual_seed(1), 24, 24, None, 1e-9)
    return subject, trial.draw(2, trial.round_length(12))


@torch.no_grad()
def drop_columns(layer: MultiHeadLayer, head: int) -> None:
    """Set to zero what the output projections of a layer read from a head."""
    for name, module in layer.named_modules():
        if name.endswith("out_proj"):
            assert isinstance(module, nn.Linear)
            width = module.in_features // layer.heads
            module.weight[:, head * width : (head + 1) * width] = 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_have_layers_with_heads(recipe: str) -> None:
    assert bool(attention_heads(build_tiny(recipe, {}, 0))) == (recipe not in WITHOUT_HEADS)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - WITHOUT_HEADS))
def test_a_gate_of_zero_removes_a_head(recipe: str) -> None:
    (subject, inputs), gates = subject_and_inputs(recipe), dict[str, Tensor]()
    layers = attention_heads(subject.model)
    for number, (name, layer) in enumerate(layers.items()):
        gates[name] = torch.ones(layer.heads)
        gates[name][number % layer.heads] = 0
    with torch.no_grad():
        before = subject(inputs).logits
        with gated_heads(subject.model, {name: torch.ones(layer.heads) for name, layer in layers.items()}):
            torch.testing.assert_close(subject(inputs).logits, before, rtol=1e-12, atol=1e-12)
        with gated_heads(subject.model, gates):
            gated = subject(inputs).logits
        torch.testing.assert_close(subject(inputs).logits, before, rtol=0, atol=0)
        for number, layer in enumerate(layers.values()):
            drop_columns(layer, number % layer.heads)
        torch.testing.assert_close(gated, subject(inputs).logits, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(gated, before)


@pytest.mark.parametrize("recipe", ["shaw", "transformer-xl", "gtrxl", "calm", "rfa"])
def test_steps_of_one_token_are_gated(recipe: str) -> None:
    subject, _ = subject_and_inputs(recipe)
    gates = {name: torch.tensor([0.0, 0.5]) for name in attention_heads(subject.model)}
    with gated_heads(subject.model, gates):
        assert mf.check(subject.model, only=["decode", "cached"], length=12).ok


@pytest.mark.parametrize("recipe", ["transformer-lm", "reformer", "universal-transformer-lm", "etc"])
def test_gates_of_rows_have_gradients_of_rows(recipe: str) -> None:
    """The gradient of a gate (b, h) is that of a gate (h) with the loss of its row alone."""
    subject, inputs = subject_and_inputs(recipe)
    layers = attention_heads(subject.model)
    gates = {name: nn.Parameter(torch.ones(2, layer.heads).double()) for name, layer in layers.items()}
    with gated_heads(subject.model, gates):
        subject(inputs).logits.pow(2).sum().backward()  # type: ignore[no-untyped-call]
    for row in range(2):
        shared = {name: nn.Parameter(torch.ones(layer.heads).double()) for name, layer in layers.items()}
        with gated_heads(subject.model, shared):
            subject(inputs).logits[row].pow(2).sum().backward()  # type: ignore[no-untyped-call]
        for name in layers:
            torch.testing.assert_close(gates[name].grad[row], shared[name].grad)  # type: ignore[index]


def test_nested_gates_multiply() -> None:
    model = mf.build("transformer-lm", vocab=7, dim=8, heads=2, depth=1)
    layer = attention_heads(model)["body.0.attention"]
    with gated_heads(model, {"body.0.attention": torch.tensor([1.0, 2.0])}):
        with gated_heads(model, {"body.0.attention": torch.tensor([3.0, 5.0])}):
            assert isinstance(layer.head_gates, ConstantGates)
            assert layer.merge_heads(torch.ones(1, 2, 1, 1)).tolist() == [[[3.0, 10.0]]]
        assert layer.merge_heads(torch.ones(1, 2, 1, 1)).tolist() == [[[1.0, 2.0]]]
    assert layer.head_gates is None


@pytest.mark.parametrize(
    ("name", "gates", "message"),
    [
        ("body.1.attention", torch.ones(2), "no layer with heads is named 'body.1.attention'; there are body.0"),
        ("body.0.attention", torch.ones(3), r"body.0.attention has 2 heads, but its gates have the shape \(3,\)"),
        ("body.0.attention", torch.ones(2).requires_grad_(), "must be an nn.Parameter"),
    ],
)
def test_wrong_gates_are_refused(name: str, gates: Tensor, message: str) -> None:
    model = mf.build("transformer-lm", vocab=7, dim=8, heads=2, depth=1)
    with pytest.raises(ValueError, match=message), gated_heads(model, {name: gates}):
        pass
