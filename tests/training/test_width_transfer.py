"""Rates and first scales over widths: table 8 of arXiv:2203.03466, and activations that do not grow with the width."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import a_run, make
from runs import go

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import RunConfig
from manyformer.models import Model
from manyformer.training.engine import TrainingEngine
from manyformer.training.process_group import DDPStrategy
from manyformer.training.width_transfer import rate_scales, scale_first_weights

WIDTHS = (32, 512)


def a_wide_run(dim: int, mup: dict[str, Any], recipe: str = "transformer-lm") -> RunConfig:
    """A run of a model whose head is tied to the embedding, or, of `llama`, is not."""
    keywords = {"vocab": 11, "dim": dim, "depth": 2, "heads": dim // 16}
    return RunConfig.model_validate({"recipe": recipe, "model": keywords, "optim": {"lr": 0.01}, "mup": mup})


def built(run: RunConfig) -> Model:
    torch.manual_seed(run.seed)
    model = mf.build(run.recipe, **run.model)
    scale_first_weights(run, model)
    return model


def test_rates_and_scales_are_those_of_the_table() -> None:
    run = a_wide_run(128, {"base_width": 32}, "llama")
    scales = rate_scales(run, built(run))
    assert scales["embed.token.weight"] == 1.0
    assert scales["body.0.attention.inner.q_proj.weight"] == 1 / 4
    assert scales["body.0.ff.inner.down.weight"] == 88 / 344
    assert scales["body.0.ff.pre_norm.weight"] == 1.0
    assert scales["head.weight"] == 1 / 4
    base = built(a_wide_run(32, {"base_width": 32}, "llama"))
    sizes = [{n: float(w.detach().std()) for n, w in model.named_parameters()} for model in (base, built(run))]
    for name, ratio in (
        ("body.0.attention.inner.q_proj.weight", 0.5),
        ("head.weight", 0.25),
        ("embed.token.weight", 1),
    ):
        assert sizes[1][name] == pytest.approx(ratio * sizes[0][name], rel=0.05)


def test_the_base_model_itself_is_unchanged() -> None:
    run = a_wide_run(32, {"base_width": 32})
    torch.manual_seed(run.seed)
    plain = mf.build(run.recipe, **run.model)
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), built(run).parameters(), strict=True))
    assert set(rate_scales(run, plain).values()) == {1.0}


def test_a_tied_head_is_divided_by_the_last_norm() -> None:
    run = a_wide_run(128, {"base_width": 32})
    model = built(run)
    scales = rate_scales(run, model)
    assert scales["body.norm.inner.weight"] == 1 / 4
    assert model.body.norm.inner.weight.tolist() == pytest.approx([1 / 4] * 128)
    assert scales["embed.token.weight"] == 1.0


def size_of_steps(run: RunConfig) -> list[float]:
    """How far four steps move the outputs of the last layer and the logits, as root mean squares."""
    model = built(run)
    outputs: list[torch.Tensor] = []
    model.get_submodule("body.1").register_forward_hook(lambda module, given, out: outputs.append(out[0].detach()))
    engine = TrainingEngine(model, run.optim, DDPStrategy(), rate_scales=rate_scales(run, model))
    batch = make("language-model", 1)
    logits = [model(batch.tokens).logits.detach()]
    for _ in range(4):
        engine.step([batch], 0.01)
    logits.append(model(batch.tokens).logits.detach())
    return [float((values[-1] - values[0]).square().mean().sqrt()) for values in (outputs, logits)]


def growth_over_widths(mup: dict[str, Any], recipe: str) -> list[float]:
    """The powers of the width with which the outputs of the last layer and the logits move."""
    narrow, wide = (size_of_steps(a_wide_run(dim, mup, recipe)) for dim in (WIDTHS[0], WIDTHS[-1]))
    return [math.log(two / one) / math.log(WIDTHS[-1] / WIDTHS[0]) for one, two in zip(narrow, wide)]


@pytest.mark.parametrize("recipe", ["transformer-lm", "llama"])
def test_steps_move_activations_alike_at_every_width(recipe: str) -> None:
    """The coordinate check of the paper (appendix D.1), which a plain parametrization fails."""
    assert min(growth_over_widths({}, recipe)) > 0.3
    assert max(map(abs, growth_over_widths({"base_width": 32}, recipe))) < 0.15


def test_the_simple_form_changes_rates_alone() -> None:
    run = a_wide_run(128, {"base_width": 32, "form": "simple"})
    torch.manual_seed(run.seed)
    plain = mf.build(run.recipe, **run.model)
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), built(run).parameters(), strict=True))
    scales = rate_scales(run, plain)
    assert scales["body.1.ff.inner.up.weight"] == 1 / 4
    assert scales["body.norm.inner.weight"] == scales["embed.token.weight"] == 1.0


def test_the_decay_of_a_step_is_that_of_the_base_model() -> None:
    run = a_wide_run(128, {"base_width": 32})
    model = built(run)
    engine = TrainingEngine(model, run.optim, DDPStrategy(), rate_scales=rate_scales(run, model))
    products = {round(group["lr_scale"] * group["weight_decay"], 9) for group in engine.optimizer.param_groups}
    assert products == {0.0, 0.1}


def test_widths_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.heads 2 has no counterpart at mup\.base_width 24"):
        go(a_run(tmp_path / "run", mup={"base_width": 24}, model={"dim": 32, "depth": 1, "heads": 2}))
    for settings, sentence in (
        ({"optim": {"name": "adadelta"}}, "its rules are those of adamw and adam; adadelta has others"),
        ({"schedule": {"name": "noam"}, "optim": {"name": "adam"}}, "noam's rate follows the width"),
        ({"init_from": "runs/other"}, "init_from brings trained ones"),
    ):
        with pytest.raises(ValueError, match=sentence):
            a_run(tmp_path, mup={"base_width": 8}, **settings)
    data = [torch.randint(0, 9, (2, 8)) for _ in range(2)]
    with pytest.raises(UserError, match="leave it out with data="):
        mf.train("transformer-lm", {"mup.base_width": 8, "out": str(tmp_path)}, data=data)
