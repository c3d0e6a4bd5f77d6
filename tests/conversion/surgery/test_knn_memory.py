"""A trained model given a memory: near the old one at first, the old one without what it finds, and larger later."""

from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from perturbing import perturb

SMALL: dict[str, Any] = {
    "vocab": 13,
    "dim": 8,
    "depth": 2,
    "heads": 2,
    "ff_dim": 12,
    "dropout": 0.0,
    "memory_length": 6,
}


def made(recipe: str, **words: Any) -> LanguageModel:
    torch.manual_seed(2)
    model = mf.build(recipe, **SMALL, **words).eval()
    perturb(model, 0.3)
    assert isinstance(model, LanguageModel)
    return model


PLAIN: dict[str, dict[str, Any]] = {
    "transformer-xl": {"norm_order": "post", "bias_sharing": "per-layer", "context": "same-length"},
    "memorizing-transformer": {"knn_memory_size": None, "block": 4},
}


@pytest.mark.parametrize("recipe", PLAIN)
@torch.no_grad()
def test_a_model_begins_near_the_old_one(recipe: str, tmp_path: Path) -> None:
    old, tokens = made(recipe, **PLAIN[recipe]), torch.randint(0, 13, (2, 20))
    apart = []
    for gate in (0.5, 0.02, 1e-12):
        new = mf.memorize(old, memory=9, neighbours=3, block=4, layer=1, gate=gate)
        assert not new.training
        apart.append(float((new(tokens).logits - old(tokens).logits).abs().max()))
    assert apart[0] > 3 * apart[1] > 0
    assert apart[2] < 1e-6
    # all but the gate is as it was, and it is a recipe like others
    new.save(tmp_path / "new")
    again = mf.load(tmp_path / "new", keywords={"knn_memory_size": 30, "neighbours": 5})
    torch.testing.assert_close(again(tokens[:, :4]).logits, old(tokens[:, :4]).logits)
    assert {*new.state_dict()} - {*old.state_dict()} == {name for name in new.state_dict() if "combine" in name}
    assert next(old.parameters()).data_ptr() != next(new.parameters()).data_ptr()


def test_a_memory_may_grow_later() -> None:
    old, tokens = (
        made("memorizing-transformer", knn_memory_size=4, neighbours=3, block=4, layer=1),
        torch.randint(0, 13, (1, 30)),
    )
    old.double()
    larger, same = (mf.memorize(old, memory=size)(tokens).logits for size in (24, 4))
    torch.testing.assert_close(same, old(tokens).logits, atol=1e-12, rtol=0)
    # two blocks of four see the same; later ones see more
    torch.testing.assert_close(larger[:, :8], same[:, :8], atol=1e-12, rtol=0)
    assert (larger[:, 8:] - same[:, 8:]).abs().amax(-1).min() > 0


@pytest.mark.usefixtures("unchecked")
def test_models_layers_and_gates_that_cannot_have_a_memory_are_refused() -> None:
    with pytest.raises(UserError, match="a transformer-lm cannot be given a memory; a transformer-xl or a memorizing"):
        mf.memorize(mf.build("transformer-lm", vocab=5, dim=4, depth=1, heads=2), memory=5)
    with pytest.raises(UserError, match="set memory_length"):
        mf.memorize(mf.build("transformer-xl", **{**SMALL, "memory_length": None}), memory=5)
    with pytest.raises(UserError, match=r"layer \(2\) must be \d, the layer that has"):
        mf.memorize(made("memorizing-transformer", knn_memory_size=4, layer=1), memory=5, layer=2)
    with pytest.raises(UserError, match=r"layer \(3\) must be at most depth \(2\)"):
        mf.memorize(made("transformer-xl"), memory=5, layer=3)
    with pytest.raises(UserError, match="gate: must be a number > 0 and < 1, got 1"):
        mf.memorize(made("transformer-xl"), memory=5, gate=1)
    with pytest.raises(UserError, match="position 'xl' needs dot products"):
        made("memorizing-transformer", position="xl")
