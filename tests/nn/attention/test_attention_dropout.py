"""Dropout of attention weights: in training alone, on the weights themselves, in every recipe that forms them."""

import pytest
import torch

import manyformer as mf
from manyformer.analysis.contracts.trial import ContractTrial
from manyformer.analysis.own_models import OwnSubject, build_tiny
from manyformer.base.errors import UserError
from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn.core import ContiguousLayout
from manyformer.nn.masks import Causal
from manyformer.nn.ops.static_layout import materialize
from manyformer.nn.positions import NoPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxPath
from manyformer.recipes import RECIPES, get_recipe

REFUSED = {name for name, recipe in RECIPES.items() if "attention_dropout" in recipe.card.reasons}

WITH_DROPOUT = sorted(
    {name for name in RECIPES if "attention_dropout" in get_recipe(name).signature.parameters} - REFUSED
)


@pytest.mark.parametrize("recipe", WITH_DROPOUT)
def test_weights_are_dropped_in_training_alone(recipe: str) -> None:
    subject = OwnSubject(build_tiny(recipe, {"attention_dropout": 0.5}, 0).eval())
    plain = OwnSubject(build_tiny(recipe, {}, 0).eval())
    trial = ContractTrial(subject, torch.Generator().manual_seed(1), 24, 24, None, 1e-9)
    inputs = trial.draw(2, trial.round_length(12))
    with torch.no_grad():
        torch.testing.assert_close(subject(inputs).logits, plain(inputs).logits, rtol=0, atol=0)
        subject.model.train()
        assert not torch.allclose(*(subject.forward(inputs).logits for _ in range(2)))


@pytest.mark.parametrize("recipe", sorted(REFUSED))
def test_attention_without_weights_is_refused(recipe: str) -> None:
    with pytest.raises(UserError, match=r"attention_dropout \(0.5\) (acts on the weights of softmax|must be 0)"):
        build_tiny(recipe, {"attention_dropout": 0.5}, 0)


@pytest.mark.parametrize("path", ["naive", "sdpa", "blocked"])
def test_a_weight_is_zero_or_divided_by_the_rest(path: SoftmaxPath) -> None:
    """The identity as values makes the outputs the weights."""
    length, probability = 48, 0.25
    q, k = torch.randn(2, 1, 3, length, 8)
    v = torch.eye(length).expand(1, 3, -1, -1)
    positions = materialize(ContiguousLayout(), length)
    call = KernelCall(q, k, v, positions, positions, NoPosition())
    weights = SoftmaxKernel(Causal(), path="naive").eval()(call).y
    dropped = SoftmaxKernel(Causal(), dropout=probability, path=path).train()(call).y
    is_kept = dropped != 0
    torch.testing.assert_close(dropped[is_kept], (weights / (1 - probability))[is_kept])
    # 3,528 visible pairs: the standard deviation of the share is 0.0073
    assert is_kept.sum() / (weights != 0).sum() == pytest.approx(1 - probability, abs=0.035)


def test_a_probability_of_one_is_refused() -> None:
    with pytest.raises(UserError, match="attention_dropout"):
        mf.build("bert", vocab=7, dim=8, heads=2, depth=1, attention_dropout=1.0)
