"""Every recipe gives compiled what it gives eagerly; one layer is enough to see it."""

import pytest

import manyformer as mf
from manyformer.recipes import RECIPES

QUICK = {"transformer-lm"}
"""Compiled every time; the others, whose graphs take up to half a minute, when slow tests are asked for."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(RECIPES)]
)
def test_compiled_is_eager(recipe: str, unchecked: None) -> None:
    shallow = {"depth": 1} if "depth" in RECIPES[recipe].signature.parameters else {}
    row = mf.check(recipe, only=["compile"], keywords=shallow)["compile"]
    if row.verdict == "not promised":
        pytest.skip(row.sentence)
    assert row.verdict == "passed", row.sentence
