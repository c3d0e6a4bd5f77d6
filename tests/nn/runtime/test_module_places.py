"""One place for each module: names, `functional_call` by each of them, and weights that stay shared."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.nn.attention.head_gates import remove_heads
from manyformer.nn.positions import TransformerXLPosition
from manyformer.recipes.parts.registry import build_on_meta
from manyformer.training.parallel_strategies import shard_model

TOKENS = torch.randint(0, 29, (2, 7), generator=torch.Generator().manual_seed(0))

SHARING: list[tuple[str, dict[str, Any], str, str]] = [
    ("transformer", {}, "embed_source.token.weight", "embed_target.token.weight"),
    ("transformer-xl", {}, "body.0.attention.inner.position.biases.u", "body.1.attention.inner.position.biases.u"),
    ("t5", {}, "decoder.0.attention.inner.position.weight", "decoder.1.attention.inner.position.weight"),
    ("linformer", {}, "body.0.attention.inner.kernel.keys.weight", "body.1.attention.inner.kernel.values.weight"),
]
"""Recipes with two names of a weight of modules in two places."""


def logits(model: nn.Module, call: Any = None) -> Tensor:
    inputs = (TOKENS, TOKENS) if hasattr(model, "embed_target") else (TOKENS,)
    output = model(*inputs) if call is None else call(inputs)
    return output.logits.detach()


@pytest.mark.parametrize("part", range(2))
def test_no_module_of_a_recipe_has_two_places(part: int) -> None:
    for name in sorted(mf.recipes())[part::2]:
        names: dict[nn.Module, str] = {}
        for path, module in build_tiny(name, {}, 0).named_modules(remove_duplicate=False):
            assert module not in names, f"{name}: {names[module]} is {path}"
            names[module] = path


@pytest.mark.parametrize(("name", "keywords"), [*((case[0], case[1]) for case in SHARING), ("llama", {"loops": 3})])
@pytest.mark.parametrize("remove_duplicate", [True, False])
def test_functional_call_by_all_names_takes_other_weights_and_gives_them_back(
    name: str, keywords: dict[str, Any], remove_duplicate: bool
) -> None:
    model = build_tiny(name, keywords, 0).eval()
    before = logits(model)
    other = build_tiny(name, keywords, 1).eval()
    weights = dict(other.named_parameters(remove_duplicate=remove_duplicate))
    assert torch.equal(logits(model, lambda inputs: functional_call(model, weights, inputs)), logits(other))
    assert torch.equal(logits(model), before)
    state = dict(other.state_dict(keep_vars=True))
    assert torch.equal(logits(model, lambda inputs: functional_call(model, state, inputs)), logits(other))
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(("name", "keywords", "first", "second"), SHARING)
def test_weights_of_two_places_stay_one_without_memory_and_by_assignment(
    name: str, keywords: dict[str, Any], first: str, second: str
) -> None:
    model = build_tiny(name, keywords, 0).eval()
    assert {first, second} <= set(model.state_dict())
    empty = build_on_meta(model.spec.recipe, model.spec.keywords).eval()
    assigned = build_on_meta(model.spec.recipe, model.spec.keywords).eval()
    empty.to_empty(device="cpu")
    assigned.load_state_dict(model.state_dict(), assign=True)
    empty.load_state_dict(model.state_dict())
    for built in (model, empty, assigned, model.double()):
        assert built.get_parameter(first) is built.get_parameter(second)
    assert len(list(empty.parameters())) == len(list(model.parameters()))


def test_state_dicts_that_name_a_repeated_layer_in_each_place_load() -> None:
    model = build_tiny("llama", {"loops": 3}, 0).eval()
    state = model.state_dict()
    assert {name.split(".")[1] for name in state if name.startswith("body.")} == {"0", "1", "norm"}
    repeated = {
        name.replace(f"body.{number % 2}.", f"body.{number}."): tensor
        for number in range(6)
        for name, tensor in state.items()
    }
    other = build_tiny("llama", {"loops": 3}, 1).eval()
    other.load_state_dict(repeated)
    assert torch.equal(logits(other), logits(model))
    repeated["body.4.ff.inner.down.weight"] = repeated["body.4.ff.inner.down.weight"] + 1
    with pytest.raises(RuntimeError, match=r"body\.4\.ff\.inner\.down\.weight"):
        other.load_state_dict(repeated)


def test_spans_of_remaining_heads_are_those_of_the_cache() -> None:
    """A layer knows its learned spans twice: where they act, and where they limit what is cached."""
    model = build_tiny("adaptive-span", {}, 0)
    remove_heads(model, {"body.0.attention": [1]})
    attention = model.get_submodule("body.0.attention.inner")
    assert attention.kernel.spans.share is attention.source.span_reach.share  # type: ignore[union-attr]
    assert len(attention.kernel.spans.share) == attention.heads  # type: ignore[union-attr]


def test_weights_that_sharding_has_made_two_are_refused() -> None:
    class FSDPModule:
        """Stands for the class that torch adds."""

    model = build_tiny("transformer-xl", {}, 0)
    model.__class__ = type("Sharded", (FSDPModule, type(model)), {})
    logits(model)
    position = model.get_submodule("body.1.attention.inner.position")
    assert isinstance(position, TransformerXLPosition)
    position.biases.u = nn.Parameter(position.biases.u.detach().clone())
    with pytest.raises(UserError, match=r"body\.1\.attention\.inner\.position\.biases\.u is shared .*shard_model"):
        logits(model)


def test_a_scalar_weight_is_refused_by_name_before_anything_is_sharded() -> None:
    model = build_tiny("clip", {}, 0)
    with pytest.raises(UserError, match=r"divides no scalars, and similarity\.log_scale of clip is one: strategy=ddp"):
        shard_model(model)
