"""Removed heads: a model without them computes what it computes with their gates at 0, with fewer weights."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import manyformer as mf
from manyformer.analysis.contracts.trial import ContractTrial
from manyformer.analysis.own_models import OwnSubject, build_tiny
from manyformer.base.errors import UserError
from manyformer.models import Model
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.attention.attention import HeadlessLayer
from manyformer.nn.attention.head_gates import attention_heads, format_heads, gated_heads, parse_heads, remove_heads
from manyformer.nn.core import Context
from manyformer.nn.positions import Position
from manyformer.nn.positions.relative import ShawPosition
from manyformer.nn.positions.step_signal import LearnedQKPosition
from manyformer.recipes import RECIPES
from manyformer.recipes.parts.model_summary import count_parameters
from perturbing import perturb
from token_rows import range_positions

WITHOUT_HEADS = {name for name, recipe in RECIPES.items() if "heads" in recipe.card.reasons}
COUPLED_HEADS = {name for name, recipe in RECIPES.items() if "removable_heads" in recipe.card.reasons}
WITH_ONE_HEAD = {"gmlp", "gmlp-encoder", "gmlp-vit"}
"""Recipes without a number of heads, whose layers have one each."""


def four_heads(recipe: str) -> dict[str, Any]:
    """Keywords of a tiny model with four heads, so that some of a layer can remain."""
    if "base_keywords" in RECIPES[recipe].signature.parameters:
        return {"base_keywords": {**RECIPES[recipe].card.tiny_keywords["base_keywords"], "heads": 4}}
    return {"heads": 4} if "heads" in RECIPES[recipe].signature.parameters else {}


def heads_to_remove(model: Model) -> dict[str, list[int]]:
    """Other heads in every layer, half of them; the only head of the first of several layers that have one."""
    removed = {}
    for number, (name, layer) in enumerate(attention_heads(model).items()):
        count = layer.heads // 2 if layer.heads > 1 else int(number == 0)
        removed[name] = [(number + offset) % layer.heads for offset in range(count)]
    return removed


def logits(model: Model) -> torch.Tensor:
    """The outputs of two random rows."""
    subject = OwnSubject(model)
    trial = ContractTrial(subject, torch.Generator().manual_seed(1), 24, 24, None, 1e-9)
    with torch.no_grad():
        return subject(trial.draw(2, trial.round_length(24))).logits


def gates_of(model: Model, removed: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor([float(head not in removed.get(name, ())) for head in range(layer.heads)])
        for name, layer in attention_heads(model).items()
    }


@pytest.mark.thinned(3)
@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - WITHOUT_HEADS - COUPLED_HEADS))
def test_a_pruned_model_equals_the_masked_one(recipe: str) -> None:
    model = build_tiny(recipe, four_heads(recipe), 0).double().eval()
    removed = heads_to_remove(model)
    with gated_heads(model, gates_of(model, removed)):
        expected = logits(model)
    pruned = copy.deepcopy(model)
    remove_heads(pruned, removed)
    torch.testing.assert_close(logits(pruned), expected, rtol=1e-9, atol=1e-9)
    assert count_parameters(pruned) < count_parameters(model)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - WITHOUT_HEADS - COUPLED_HEADS - WITH_ONE_HEAD))
def test_a_recipe_builds_without_the_removed_heads(recipe: str, tmp_path: Path) -> None:
    """The keyword is in the spec, so that the saved model is loaded without them."""
    removed = heads_to_remove(build_tiny(recipe, four_heads(recipe), 0))
    model = build_tiny(recipe, {**four_heads(recipe), "removed_heads": format_heads(removed)}, 0)
    model.save(tmp_path / "pruned")
    loaded = mf.load(tmp_path / "pruned")
    assert loaded.spec == model.spec
    assert {name: weight.shape for name, weight in loaded.named_parameters()} == {
        name: weight.shape for name, weight in model.named_parameters()
    }
    torch.testing.assert_close(logits(loaded), logits(model.eval()), rtol=0, atol=0)


SLOW_TO_CHECK = ["transformer-xl", "reformer-strict", "rfa", "adaptive-span"]


@pytest.mark.parametrize(
    "recipe", ["transformer", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_TO_CHECK)]
)
def test_pruned_models_keep_their_contracts(recipe: str) -> None:
    removed = heads_to_remove(build_tiny(recipe, four_heads(recipe), 0))
    keywords = {**four_heads(recipe), "removed_heads": format_heads(removed)}
    only = ["causal", "cached", "decode", "preallocated", "gradients", "saving", "spec"]
    report = mf.check(recipe, keywords=keywords, only=only, length=16)
    assert report.ok, report


@pytest.mark.parametrize("recipe", ["transformer-lm", "transformer", "gtrxl", "routing-transformer", "longformer"])
def test_a_layer_without_heads_adds_its_bias(recipe: str) -> None:
    model = build_tiny(recipe, {}, 0).double().eval()
    name, layer = next(iter(attention_heads(model).items()))
    removed = {name: list(range(layer.heads))}
    with gated_heads(model, gates_of(model, removed)):
        expected = logits(model)
    remove_heads(model, removed)
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)
    assert name not in attention_heads(model)
    assert any(isinstance(module, HeadlessLayer) for module in model.modules())
    assert mf.check(model, only=["decode"], length=12).ok


@pytest.mark.parametrize("recipe", sorted(COUPLED_HEADS))
def test_heads_that_depend_on_each_other_are_not_removed(recipe: str) -> None:
    model = build_tiny(recipe, four_heads(recipe), 0)
    with pytest.raises(UserError, match="cannot be removed"):
        remove_heads(model, heads_to_remove(model))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("remaining", [[0, 1], [2], [1, 3]])
def test_grouped_heads(kv_heads: int, remaining: list[int]) -> None:
    """Groups of heads lose their keys when they are empty, and must otherwise remain equally large."""
    layer = perturb(Attention(8, 4, SoftmaxKernel(), kv_heads=kv_heads), 0.3)
    gates = torch.tensor([float(head in remaining) for head in range(4)])
    x, ctx = torch.randn(2, 5, 8), Context(range_positions(5))
    with gated_heads(nn.ModuleList([layer]), {"0": gates}):
        expected = layer(x, ctx).y
    layer.keep_heads(remaining)
    torch.testing.assert_close(layer(x, ctx).y, expected)
    assert layer.kv_proj.out_features == 4 * len({head * kv_heads // 4 for head in remaining})


def test_uneven_groups_are_refused() -> None:
    layer = Attention(8, 4, SoftmaxKernel(), kv_heads=2)
    with pytest.raises(ValueError, match="2 groups of 2 heads share keys and values: remove whole groups"):
        layer.keep_heads([0, 1, 2])


@pytest.mark.parametrize("position", [LearnedQKPosition(4, 2, 16, kv_heads=2), ShawPosition(2, 3, heads=4)])
def test_positions_of_heads(position: Position) -> None:
    layer = perturb(Attention(8, 4, SoftmaxKernel(), kv_heads=2, position=position), 0.3)
    x, ctx = torch.randn(2, 5, 8), Context(range_positions(5))
    with gated_heads(nn.ModuleList([layer]), {"0": torch.tensor([0.0, 0, 1, 1])}):
        expected = layer(x, ctx).y
    layer.keep_heads([2, 3])
    torch.testing.assert_close(layer(x, ctx).y, expected)


def test_shared_tables_are_copied_for_the_layer_that_loses_heads() -> None:
    model = build_tiny("transformer-xl", four_heads("transformer-xl"), 0).double().eval()
    names = list(attention_heads(model))
    removed = {names[0]: [1, 2]}
    with gated_heads(model, gates_of(model, removed)):
        expected = logits(model)
    remove_heads(model, removed)
    first, second = (layer.get_submodule("position.biases") for layer in attention_heads(model).values())
    assert isinstance(first, nn.Module)
    assert first.u.shape[0] == 2
    assert second.u.shape[0] == 4
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)


def test_parameters_and_operations_fall() -> None:
    """By those of the heads' projections and products of queries, keys and values, to the last one."""
    sizes = {"vocab": 11, "dim": 16, "heads": 4, "depth": 1, "ff_dim": 24}
    tokens, operations, parameters = torch.ones(1, 10, dtype=torch.long), [], []
    for removed in (None, "body.0.attention:0,1,3"):
        model = mf.build("transformer-lm", **sizes, removed_heads=removed).eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(tokens)
        operations.append(counter.get_total_flops())
        parameters.append(count_parameters(model))
    assert parameters[0] - parameters[1] == 3 * (3 * (16 * 4 + 4) + 4 * 16)
    assert operations[0] - operations[1] >= 3 * 2 * 10 * 4 * 16 * 4


@pytest.mark.parametrize("recipe", ["transformer-lm", "transformer-xl"])
def test_conversions_of_a_pruned_model(recipe: str) -> None:
    model = build_tiny(recipe, four_heads(recipe), 0).eval()
    pruned = mf.prune_heads(model, {"body.0.attention": [0, 3]})
    converted = mf.memorize(pruned, memory=8) if recipe == "transformer-xl" else mf.early_exit(pruned, threshold=2.0)
    assert attention_heads(converted)["body.0.attention"].heads == 2
    rebuilt = mf.build(converted.spec.recipe, **converted.spec.keywords)
    assert {name: weight.shape for name, weight in rebuilt.named_parameters()} == {
        name: weight.shape for name, weight in converted.named_parameters()
    }


def test_recipes_that_choose_no_number_of_heads_are_refused() -> None:
    with pytest.raises(UserError, match="gmlp does not choose a number of heads, so none of them can be removed"):
        mf.prune_heads(build_tiny("gmlp", {}, 0), {})


def test_heads_that_no_output_projection_joins_are_refused() -> None:
    with pytest.raises(UserError, match="no layer of this model has heads that an output projection joins"):
        mf.build("gat", removed_heads="body.attention_0:1")


def test_heads_of_a_pruned_model_do_not_share_dimensions() -> None:
    pruned = mf.prune_heads(build_tiny("transformer-lm", {}, 0), {"body.0.attention": [0]})
    with pytest.raises(UserError, match="heads were removed from this model"):
        mf.collaborate(pruned, shared=4)


def test_removed_heads_as_text() -> None:
    removed = {"encoder.0.attention": (1, 3), "decoder.2.cross": (0,)}
    assert format_heads({**removed, "encoder.1.attention": ()}) == "encoder.0.attention:1,3 decoder.2.cross:0"
    assert parse_heads(format_heads(removed)) == removed
    assert parse_heads("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("body.0", "removed_heads ('body.0') must be layers with numbers of heads, such as"),
        ("body.0.attention:-1", "removed_heads ('body.0.attention:-1') must be"),
        ("body.0.attention:0 body.0.attention:1", "each layer once"),
        ("body.7.attention:0", "there is no layer 'body.7.attention' with heads; "),
        ("body.0.attention:5", "body.0.attention has no head 5: its 2 heads are numbered from 0"),
    ],
)
def test_wrong_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        mf.build("transformer-lm", vocab=7, dim=8, heads=2, depth=2, removed_heads=text)


def test_a_memory_needs_a_head() -> None:
    model = build_tiny("compressive-transformer", {}, 0)
    name = next(iter(attention_heads(model)))
    with pytest.raises(UserError, match=r"heads 0, 1 of .* cannot be removed: the memory of PrefixSource needs"):
        remove_heads(model, {name: [0, 1]})


def test_recipes_that_choose_no_number_of_heads_have_no_such_keyword() -> None:
    for recipe in WITH_ONE_HEAD | WITHOUT_HEADS:
        signature = RECIPES[recipe].signature.parameters
        assert ("removed_heads" in signature) == ("heads" in signature)
