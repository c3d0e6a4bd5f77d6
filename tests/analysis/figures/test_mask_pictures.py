"""Pictures of masks and of mixing: the text says what is visible, and a file is written where one is asked for.

Mixing is as measured: exchanges token by token give the same, masks bound it, models without token outputs refuse."""

from pathlib import Path

import pytest
import torch

import manyformer as mf
from manyformer.analysis.figures import attention_masks, draw_mixing, mixing_strengths
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.models import Model
from manyformer.models.tasks import Inputs
from manyformer.nn import masks as m
from manyformer.recipes.parts.registry import task_of


def test_small_masks_are_drawn_pair_by_pair() -> None:
    assert mf.draw(m.Causal(), 3).split() == ["█··", "██·", "███"]
    assert mf.draw(m.Window(2) | m.VisibleToAll(m.FirstTokens(1)), 4).split() == ["█···", "██··", "███·", "█·██"]
    assert mf.draw(m.Local2D(4, 1, 2, 1, 1), 6).split() == ["█·····", "██····", "·██···", "·███··", "███·█·", "███·██"]


def test_heads_that_differ_stand_apart() -> None:
    text = mf.draw(m.PerHead({1: m.Window(1)}, default=m.Causal()), 2, heads=3)
    assert text == "heads 0, 2\n█·\n██\n\nheads 1\n█·\n·█"
    assert mf.draw(m.Causal(), 2, heads=8) == "█·\n██"


def test_long_masks_are_shaded() -> None:
    rows = mf.draw(m.Causal(), 640).split()
    assert len(rows) == len(rows[0]) == 64
    assert rows[1][:3] == "█▒·"
    # a single visible pair is never drawn as nothing, a single hidden one never as all
    assert mf.draw(m.AttendsToAll(m.AtPositions(0)) & m.VisibleToAll(m.AtPositions(0)), 640).split()[0][0] == "░"
    assert mf.draw(~(m.AttendsToAll(m.AtPositions(0)) & m.VisibleToAll(m.AtPositions(0))), 640).split()[0][0] == "▓"


def test_a_picture_is_written(tmp_path: Path) -> None:
    for name in ("one.png", "two.svg"):
        mf.draw(m.union(m.strided_pattern(4)), 16, path=tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(UserError, match="must end in one of"):
        mf.draw(m.Causal(), 4, path=tmp_path / "mask.txt")
    with pytest.raises(UserError, match="length \\(9999\\)"):
        mf.draw(m.Causal(), 9999)


def test_the_masks_of_a_model() -> None:
    model = mf.build("longformer-lm", dim=16, heads=2, depth=4, window=4, top_window=4, dilated_heads=1)
    actual = attention_masks(model)
    assert next(iter(actual)) == m.Window(4)
    assert actual[m.Window(4)] == ["body.0.attention.inner.kernel", "body.1.attention.inner.kernel"]
    assert m.PerHead({0: m.Window(4, dilation=2)}, default=m.Window(4)) in actual


def random_inputs(model: Model, length: int) -> Inputs:
    task = task_of(model)
    return task.example(model, torch.randint(task.token_ids(model), (2, length), generator=torch.manual_seed(0)))


@pytest.mark.parametrize("name", ["transformer-lm", "fnet", "transformer"])
def test_strengths_are_those_of_tokens_exchanged_one_by_one(name: str) -> None:
    model = build_tiny(name, {}, 0).eval()
    inputs = random_inputs(model, 12)
    task, ids = task_of(model), task_of(model).token_ids(model)
    changes = torch.zeros(12, 12)
    for column in range(12):
        tokens = inputs.tokens.clone()
        tokens[:, column] = (tokens[:, column] + ids // 2) % ids
        with torch.no_grad():
            before, after = (task.call(model, part).logits for part in (inputs, inputs._replace(tokens=tokens)))
        changes[:, column] = (after - before).norm(dim=-1).mean(0)
    beside = changes.clone().fill_diagonal_(0).amax(1)
    beside[beside < 1e-6] = changes.diagonal()[beside < 1e-6]
    expected = (changes / beside[:, None]).clamp_max(1)
    torch.testing.assert_close(mixing_strengths(model, inputs), expected, atol=1e-4, rtol=1e-4)


def test_masks_bound_what_is_mixed() -> None:
    causal = mixing_strengths(model := build_tiny("transformer-lm", {}, 0), random_inputs(model, 16))
    assert (causal > 0).equal(torch.ones(16, 16).tril().bool())
    near = mixing_strengths(model := build_tiny("llama", {"window": 2, "depth": 1}, 0), random_inputs(model, 16))
    assert (near.tril(-2) == 0).all()
    assert (near.diagonal(-1) == 1).all()


def test_the_picture_has_a_line_for_each_output() -> None:
    lines = draw_mixing(torch.tensor([[1.0, 0.0], [0.5, 1.0]])).splitlines()
    assert lines == ["█·", "▒█"]


def test_models_without_outputs_of_tokens_and_long_inputs_are_refused() -> None:
    image_model = build_tiny("vit", {}, 0)
    length = task_of(image_model).fixed_length(image_model)
    assert length is not None
    with pytest.raises(UserError, match="vit has one output for all tokens: an image has one label"):
        mixing_strengths(image_model, random_inputs(image_model, length))
    text_model = build_tiny("transformer-lm", {"max_length": 200}, 0)
    with pytest.raises(UserError, match=r"length \(129\) must be at most 128"):
        mixing_strengths(text_model, random_inputs(text_model, 129))
