"""The operations and memory of a planned step against those of a real one, for every recipe."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

import manyformer as mf
from manyformer.analysis.own_models import tiny_keywords
from manyformer.analysis.planning import rehearsed_step as planned
from manyformer.analysis.planning.rehearsed_step import BY_RUNNING, BY_SHAPES, LiveMemoryMode, StepRehearsal, step_cost
from manyformer.base.errors import UserError
from manyformer.models import Model

ROWS, LENGTH = 2, 48


def real_model(recipe: str, keywords: dict[str, Any]) -> Model:
    torch.manual_seed(0)
    return mf.build(recipe, **keywords).train()


def soften_decays(model: Model) -> None:
    """Long memories, as after training: where they fall fast, chunks are shorter than shapes tell, and cost less."""
    for name, parameter in model.named_parameters():
        if name.endswith("decay.a_log"):
            nn.init.constant_(parameter, -6.0)


SOME = ("transformer-lm", "bert", "longformer-lm", "linear-transformer", "reformer", "t5", "gat", "vit", "gtrxl")
"""Of every kind of operation one; all recipes are planned in the test marked slow."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in sorted(mf.recipes())]
)
def test_operations_are_those_of_the_counter(recipe: str) -> None:
    keywords = tiny_keywords(recipe)
    cost = step_cost(recipe, keywords, rows=ROWS, length=LENGTH)
    # the same step with weights, counted by torch's FlopCounterMode
    model = real_model(recipe, keywords)
    soften_decays(model)
    counted = StepRehearsal(model, ROWS, LENGTH, None).flops()
    assert cost.flops == pytest.approx(counted, rel=0.03)
    assert cost.peak >= cost.activations + cost.logits > 0


@pytest.mark.thinned(2)
@pytest.mark.parametrize("recipe", ["transformer-lm", "bert", "llama", "linear-transformer", "vit"])
def test_memory_by_shapes_is_that_of_real_tensors(recipe: str) -> None:
    keywords = tiny_keywords(recipe) | {"dim": 32}
    cost = step_cost(recipe, keywords, rows=ROWS, length=LENGTH)
    assert cost.method == BY_SHAPES
    real = StepRehearsal(real_model(recipe, keywords), ROWS, LENGTH, None).memory()
    # on `meta` the keys of grouped queries are repeated
    assert cost.peak == pytest.approx(real.peak, rel=0.08)
    assert cost.activations == pytest.approx(real.activations, rel=0.08)
    assert cost.logits == pytest.approx(real.logits, rel=0.05)


def test_a_planned_step_has_no_weights() -> None:
    """These would be 16 TB."""
    cost = step_cost("transformer-lm", {"dim": 1 << 18, "depth": 5, "heads": 1 << 12}, rows=1, length=16)
    assert cost.parameters > 4e12
    assert cost.method == BY_SHAPES
    assert cost.flops == pytest.approx(6 * 16 * cost.parameters, rel=0.05)


def test_logits_in_chunks_are_planned_by_shapes() -> None:
    """Autocast, which their dtype depends on, knows no meta device."""
    keywords = {"vocab": 32000, "dim": 16, "depth": 1, "heads": 2}
    cost = step_cost("llama", keywords, rows=4, length=512)
    assert cost.method == BY_SHAPES
    # those of all 2,048 tokens would be 262 MB
    assert cost.logits < 4 * 512 * 32000


@pytest.mark.slow
def test_checkpointing_stores_fewer_activations_and_computes_more() -> None:
    keywords: dict[str, Any] = {"dim": 64, "depth": 6, "heads": 2, "vocab": 50}
    plain, checkpointed = (
        step_cost("transformer-lm", keywords, rows=2, length=64, checkpointing=value) for value in (False, True)
    )
    assert checkpointed.activations < plain.activations / 4
    assert plain.flops < checkpointed.flops < 1.5 * plain.flops


@pytest.mark.slow
def test_bfloat16_halves_what_products_read_alone() -> None:
    keywords: dict[str, Any] = {"dim": 64, "depth": 4, "heads": 2, "vocab": 50}
    single, half = (step_cost("transformer-lm", keywords, rows=8, length=64, bfloat16=value) for value in (False, True))
    assert 0.4 < half.activations / single.activations < 0.95
    assert half.flops == single.flops


def test_what_must_be_run_is_refused_where_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "MAX_REAL_PARAMETERS", 1000)
    with pytest.raises(UserError, match=r"the operations of reformer depend on values, .* at most 1,000"):
        step_cost("reformer", tiny_keywords("reformer"), rows=1, length=48)


def test_live_memory_follows_storages_to_their_end() -> None:
    with LiveMemoryMode(classes=7) as mode:
        x = torch.zeros(10, 10)
        view = x[2:]
        logits = torch.zeros(3, 7)
        assert (mode.live, mode.live_logits) == (484, 84)
        del x, logits
        gc.collect()
        assert mode.live == 400  # the view holds its storage
        del view
        gc.collect()
        assert (mode.live, mode.peak) == (0, 484)


@pytest.mark.slow
def test_which_recipes_must_be_run() -> None:
    for recipe, method in (("gat", BY_SHAPES), ("t5", BY_SHAPES), ("reformer", BY_RUNNING), ("conformer", BY_RUNNING)):
        assert step_cost(recipe, tiny_keywords(recipe), rows=1, length=LENGTH).method == method, recipe
