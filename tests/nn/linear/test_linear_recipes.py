"""Recipes of linear kernels with other parts than those that the contracts see by default."""

from typing import Any

import pytest

import manyformer as mf

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("linear-transformer", {"update_rule": "delta"}),
    ("performer", {"feature_kernel": "relu"}),
    ("rfa", {"update_rule": "sum"}),
    ("linformer", {"projection_sharing": "none", "top_projected_length": 5}),
    ("linformer", {"projection": "convolution", "projection_sharing": "keys-values"}),
    ("performer", {"directions": "independent"}),
    ("performer-encoder", {"feature_kernel": "relu"}),
    ("rfa", {"feature_kernel": "arccos"}),
    ("linformer", {"projection_sharing": "heads"}),
    ("linformer", {"projection": "max"}),
    ("linformer", {"projection": "mean"}),
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("recipe", "words"), VARIANTS)
def test_every_promise_is_kept(recipe: str, words: dict[str, Any]) -> None:
    # longer than the chunks in which sums are carried on
    report = mf.check(recipe, skip={"compile", "learns"}, keywords=words, length=112)
    assert not report.failed, report.failed[0].sentence
