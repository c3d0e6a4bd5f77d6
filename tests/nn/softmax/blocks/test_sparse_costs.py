"""Costs are told of what would run: without weights, in blocks, and no more than linear in what is visible."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.models.embedding import positions_of
from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn import masks as m
from manyformer.nn.masks import Mask
from manyformer.nn.positions import NoPosition
from manyformer.nn.runtime.costs import count_flops
from manyformer.recipes.parts.model_summary import forward_cost
from manyformer.recipes.parts.registry import build_on_meta

SMALL = {"vocab": 17, "dim": 8, "heads": 2, "depth": 1, "ff_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "longformer-lm": {"window": 30, "top_window": 30},
    "longformer": {"window": 30, "max_length": 1024},
    "bigbird": {"block": 64, "random": None, "max_length": 1024},
    "bigbird-etc": {"block": 32, "max_length": 1024, "summaries": 9},
    "etc": {"window": 30},
    "compose": {"position": "alibi", "kernel": "window"},
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", MODELS)
def test_without_weights_as_with(name: str) -> None:
    words = SMALL | MODELS[name]
    model: Any = mf.build(name, **words)
    tokens = torch.zeros(1, 700, dtype=torch.long)
    with torch.no_grad():
        actual = count_flops(lambda: model(tokens))
    cost = forward_cost(build_on_meta(name, words), 700)
    assert cost.flops == actual
    # all pairs, their scores and their values, would be more
    linear = actual - forward_cost(build_on_meta(name, words), 350).flops * 2
    assert linear < 0.25 * 4 * 700**2 * 8


BLOCK = 64
LINEAR: dict[str, Callable[[int], Mask]] = {
    "image": lambda _: m.Local2D(64, 8, 16, 2, 16),
    "causal random": lambda _: (
        m.Causal()
        & (
            m.Window(3 * BLOCK)
            | m.VisibleToAll(m.FirstTokens(BLOCK))
            | m.RandomBlocks(BLOCK, 3, 256, local_blocks=3, skip_first=1, past_only=True)
        )
    ),
    # drawn for texts of that length: of a longer list, short texts would have less
    "random": lambda length: (
        m.LocalBlocks(BLOCK, lookback=BLOCK, lookahead=BLOCK)
        | m.GlobalTokens(m.FirstTokens(BLOCK))
        | m.RandomBlocks(BLOCK, 3, length // BLOCK, skip_first=1)
    ),
    "local blocks": lambda _: m.Causal() & m.LocalBlocks(128, lookback=128),
    "dilated heads": lambda _: m.PerHead({0: m.Window(256, dilation=2)}, default=m.Window(256)),
    "ragged blocks": lambda _: m.PerHead({0: m.LocalBlocks(128)}, default=m.Causal() & m.LocalBlocks(100, lookback=30)),
    "sinks": lambda _: m.Causal() & (m.Window(200) | m.VisibleToAll(m.FirstTokens(4))),
    "asymmetric": lambda _: m.Window(200, lookahead=50),
}


SLOW = ("causal random", "random")
"""Planned for several seconds; run when slow tests are asked for."""


@pytest.mark.thinned(2)
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
            place, _ = positions_of(torch.zeros(1, length, dtype=torch.long), None, None)
            q, k, v = (torch.zeros(1, 2, length, 8, device="meta") for _ in range(3))
            kernel = SoftmaxKernel(LINEAR[name](length))
            work.append(count_flops(lambda: kernel(KernelCall(q, k, v, place, place, NoPosition()))))  # noqa: B023
    assert math.log(work[1] / work[0]) / math.log(8) <= 1.05
