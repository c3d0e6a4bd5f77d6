"""Every recipe learns a toy task that needs a look at other places."""

import pytest

import manyformer as mf
from manyformer.recipes import RECIPES

ORDINARY = {"transformer", "transformer-lm", "bert", "linear-transformer", "reformer", "gat", "conformer", "captioner"}
"""One recipe of each kind of mixing and of input; training the others takes minutes."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.slow) for name in sorted(RECIPES)]
)
def test_a_toy_task_is_learnt(recipe: str, unchecked: None) -> None:
    # shapes are checked where the other contracts run, on the same models
    row = mf.check(recipe, only=["learns"])["learns"]
    if row.verdict == "not promised":
        pytest.skip(row.sentence)
    assert row.verdict == "passed", row.sentence
