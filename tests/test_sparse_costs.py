"""Costs are told of what would run: without weights, in blocks, and no more than linear in what is visible."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer import masks as m
from manyformer.flops import count_flops
from manyformer.kernels import Softmax
from manyformer.masks import Mask
from manyformer.models.places import locate
from manyformer.position import NoPosition
from manyformer.summary import cost, sketch

SMALL = {"vocab": 17, "dim": 8, "heads": 2, "depth": 1, "hidden": 8}
MODELS: dict[str, dict[str, Any]] = {
    "longformer-lm": {"window": 30, "top": 30},
    "longformer": {"window": 30, "longest": 1024},
    "bigbird": {"block": 64, "random": None, "longest": 1024},
    "bigbird-etc": {"block": 32, "longest": 1024, "summaries": 9},
    "etc": {"window": 30},
    "compose": {"position": "alibi", "kernel": "window"},
}


@pytest.mark.parametrize("name", MODELS)
def test_without_weights_as_with(name: str) -> None:
    words = SMALL | MODELS[name]
    model: Any = mf.build(name, **words)
    tokens = torch.zeros(1, 700, dtype=torch.long)
    with torch.no_grad():
        found = count_flops(lambda: model(tokens))
    told = cost(sketch(name, words), 700)
    assert told.flops == found
    # all pairs, their scores and their values, would be more
    linear = found - cost(sketch(name, words), 350).flops * 2
    assert linear < 0.25 * 4 * 700**2 * 8


BLOCK = 64
LINEAR: dict[str, Callable[[int], Mask]] = {
    "image": lambda _: m.Local2D(64, 8, 16, 2, 16),
    "causal random": lambda _: (
        m.Causal()
        & (m.Window(3 * BLOCK) | m.To(m.First(BLOCK)) | m.RandomBlocks(BLOCK, 3, 256, near=3, lead=1, past=True))
    ),
    # drawn for texts of that length: of a longer list, short texts would have less
    "random": lambda length: (
        m.Blocks(BLOCK, before=BLOCK, after=BLOCK)
        | m.Global(m.First(BLOCK))
        | m.RandomBlocks(BLOCK, 3, length // BLOCK, lead=1)
    ),
    "local blocks": lambda _: m.Causal() & m.Blocks(128, before=128),
    "dilated heads": lambda _: m.Heads({0: m.Window(256, dilation=2)}, rest=m.Window(256)),
    "ragged blocks": lambda _: m.Heads({0: m.Blocks(128)}, rest=m.Causal() & m.Blocks(100, before=30)),
    "sinks": lambda _: m.Causal() & (m.Window(200) | m.To(m.First(4))),
    "asymmetric": lambda _: m.Window(200, ahead=50),
}


SLOW = ("causal random", "random")
"""Planned for several seconds; run when slow tests are asked for."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LINEAR]
)
def test_operations_grow_no_faster_than_length(name: str) -> None:
    """The logarithm of operations against that of the length, from 2k to 16k tokens.

    These are masks whose visible pairs grow linearly in this range. Where the first rows see much less than later ones,
    as with high areas above the blocks of an image, pairs themselves grow faster at first.
    """
    work = []
    with torch.no_grad():
        for length in (2048, 16384):
            place, _ = locate(torch.zeros(1, length, dtype=torch.long), None, None)
            q, k, v = (torch.zeros(1, 2, length, 8, device="meta") for _ in range(3))
            kernel = Softmax(LINEAR[name](length))
            work.append(count_flops(lambda: kernel(q, k, v, place, place, NoPosition())))  # noqa: B023
    assert math.log(work[1] / work[0]) / math.log(8) <= 1.05
