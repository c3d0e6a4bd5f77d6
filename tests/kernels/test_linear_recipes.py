"""Recipes of linear kernels with other parts than those that the contracts see by default."""

from typing import Any

import pytest

import manyformer as mf


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("linear-transformer", {"memory": "delta"}),
        ("performer", {"kernel": "relu"}),
        ("performer", {"directions": "independent"}),
        ("performer-encoder", {"kernel": "relu"}),
        ("rfa", {"kernel": "arccos"}),
        ("rfa", {"memory": "sum"}),
        ("linformer", {"sharing": "none", "top_slots": 5}),
        ("linformer", {"sharing": "heads"}),
        ("linformer", {"projection": "max"}),
        ("linformer", {"projection": "mean"}),
        ("linformer", {"projection": "convolution", "sharing": "keys-values"}),
    ],
)
def test_every_promise_is_kept(recipe: str, words: dict[str, Any]) -> None:
    report = mf.check(recipe, skip={"compile", "learns"}, keywords=words)
    assert not report.failed, report.failed[0].sentence
