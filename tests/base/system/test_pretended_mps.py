"""Every recipe on a device without float64: training, packed rows, padding and decoding give what the CPU gives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.analysis.contracts import check
from manyformer.analysis.own_models import build_tiny
from manyformer.models import Model
from manyformer.models.tasks import Inputs
from manyformer.nn.core import tree_map
from manyformer.recipes import RECIPES, get_recipe
from manyformer.recipes.parts.registry import task_of
from pretended_mps import MPS, REFUSED, OnMps, implemented_operators, move_model, pretended_mps

ROWS, LENGTH = 2, 24
PROMPTS = [[1, 2, 3, 4, 1], [2, 3, 4]]
OVERLAPPING = {"jamba", "mamba", "samba"}
"""Recipes whose decoding writes into views of itself, which the pretended tensors cannot."""

Place = Callable[[Any], Any]


def on_cpu(tree: Any) -> Any:
    return tree


def on_mps(tree: Any) -> Any:
    return tree_map(lambda tensor: tensor.to("mps"), tree)


def prepared(recipe: str) -> tuple[Model, Inputs, Any]:
    model, generator = build_tiny(recipe, {}, 0), torch.Generator().manual_seed(0)
    task = task_of(model)
    length = task.fixed_length(model) or min(LENGTH, model.max_length or LENGTH)
    tokens = torch.randint(task.token_ids(model), (ROWS, length), generator=generator)
    inputs = task.example(model, tokens)
    return model, inputs, task.random_targets(model, inputs, generator)


def packed_segments(tokens: Tensor) -> Tensor:
    segments = torch.zeros(tokens.shape[:2], dtype=torch.long)
    segments[0, tokens.shape[1] // 3 :] = 1
    # and padding at either side
    segments[0, -2:] = segments[1, :3] = -1
    return segments


def trained(recipe: str, place: Place, *, packed: bool = False) -> list[Tensor]:
    """The losses of two steps of the optimizer, and a score after them."""
    model, inputs, targets = prepared(recipe)
    if place is on_mps:
        move_model(model)
    if packed:
        inputs = inputs._replace(segments=packed_segments(inputs.tokens))
        targets = targets.masked_fill(inputs.segments < 0, -100)
    batch = task_of(model).batch(model, place(inputs), place(targets))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        loss = model.train().loss(batch)
        total = loss.total / loss.targets + loss.extra
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(host(total.detach()))
    with torch.no_grad():
        score = model.eval().score(batch)
    return [*losses, host(torch.as_tensor(score.nll))]


def host(tensor: Tensor) -> Tensor:
    return (tensor.computed if isinstance(tensor, OnMps) else tensor).double()


def takes_segments(recipe: str) -> bool:
    _, inputs, targets = prepared(recipe)
    if not isinstance(targets, Tensor) or targets.shape[:2] != inputs.tokens.shape[:2]:
        return False
    try:
        trained(recipe, on_cpu, packed=True)
    except (ValueError, TypeError, AttributeError):
        return False
    return True


@pytest.mark.thinned(9)
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_recipe_trains_without_float64(recipe: str) -> None:
    for packed in (False, True):
        if packed and not takes_segments(recipe):
            continue
        expected = trained(recipe, on_cpu, packed=packed)
        with pretended_mps():
            actual = trained(recipe, on_mps, packed=packed)
        assert not REFUSED
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


CONTINUES = [name for name in sorted(RECIPES) if RECIPES[name].card.task.generates == "continuation"]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 1}


@pytest.mark.thinned(9)
@pytest.mark.parametrize("recipe", [name for name in CONTINUES if name not in OVERLAPPING])
def test_every_recipe_decodes_without_float64(recipe: str) -> None:
    for options in ({}, SAMPLED, {"beam": 2}):
        tokens = []
        for pretends in (False, True):
            model = build_tiny(recipe, {}, 0)
            if not pretends:
                tokens.append(mf.generate(model, PROMPTS, max_new=6, stop_ids=(), **options).tokens)
                continue
            with pretended_mps():
                result = mf.generate(move_model(model), PROMPTS, max_new=6, stop_ids=(), **options)
            tokens.append(result.tokens)
        assert tokens[0] == tokens[1], options


POSITIONS = get_args(get_args(get_recipe("compose").signature.parameters["position"].annotation)[0])


@pytest.mark.parametrize("position", POSITIONS)
def test_positions_of_packed_rows_are_those_of_float64(position: str) -> None:
    torch.manual_seed(0)
    model = mf.build("compose", vocab=11, dim=16, depth=1, heads=2, max_length=32, position=position).eval()
    tokens = torch.randint(11, (2, 24))
    segments = packed_segments(tokens)
    with torch.no_grad():
        expected = model(tokens, segments).logits
        with pretended_mps():
            actual = move_model(model)(on_mps(tokens), on_mps(segments)).logits
    torch.testing.assert_close(host(actual), expected.double(), rtol=1e-5, atol=5e-6)


def test_contracts_are_checked_on_a_device_without_float64() -> None:
    with pretended_mps():
        # torch compiles no pretended tensors
        report = check(move_model(build_tiny("transformer-lm", {"depth": 1}, 0)), length=16, skip=["compile"])
    # nor does it put loaded numbers into them
    assert {row.contract for row in report.failed} <= {"saving"}
    assert report["float64"].verdict == "not run"
    assert report["causal"].verdict == report["cached"].verdict == "passed"


def test_a_device_without_float64_is_what_is_pretended() -> None:
    """The tests above would find what they are for."""
    with pretended_mps():
        x = torch.ones(2, device="mps")
        assert x.device == MPS
        for convert in (lambda: x.double(), lambda: torch.zeros(2, dtype=torch.float64, device="mps")):
            with pytest.raises(TypeError, match="doesn't support float64"):
                convert()
        with pytest.raises(TypeError, match="doesn't support float64"):
            torch.cumsum(x, 0, dtype=torch.float64)
        # computed in C++ from an operator that is there
        assert (x + x).sum().item() == 4.0
        with pytest.raises(NotImplementedError, match="aten::mode"):
            x.mode()
        assert len(REFUSED) == 1


def test_the_table_of_torch_knows_operators_of_mps() -> None:
    operators = implemented_operators()
    assert {"aten::mm", "aten::add.Tensor", "aten::_fused_adamw_", "aten::_softmax"} <= operators
    # missing in every version from 2.10 to 2.15
    assert operators.isdisjoint({"aten::mode", "aten::ormqr", "aten::linalg_eig"})


def test_a_plugin_that_needs_a_missing_operator_is_told(tmp_path: Path) -> None:
    """By the name of the operator, of the recipe, and what would be right."""
    from manyformer.base.errors import UserError

    model = build_tiny("transformer-lm", {}, 0)
    forward = model.head.forward

    def with_missing(x: Tensor) -> Tensor:
        scores = forward(x)
        return scores + scores.mode(-1, keepdim=True).values * 0

    model.head.forward = with_missing  # type: ignore[method-assign]
    with pretended_mps(), pytest.raises(UserError) as caught:
        mf.generate(move_model(model), PROMPTS, max_new=2, stop_ids=())
    assert str(caught.value) == (
        "the device mps has no aten::mode in this version of torch, which transformer-lm needs; use the device "
        "cpu, or set PYTORCH_ENABLE_MPS_FALLBACK=1, with which torch computes it on the CPU"
    )
