"""Branches for tests of rules of streams, which are run without layers."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from manyformer.nn.streams import BranchPlace, StreamRule

M = TypeVar("M", bound=nn.Module)


def branch_outputs(number: int, x: Tensor) -> Tensor:
    """Some branch of a number: another function for each."""
    return (x * (1 + 0.1 * number)).sin() + 0.1 * x.roll(number + 1, -1)


def run_rule(rule: StreamRule[Any], x: Tensor, branches: Sequence[int]) -> Tensor:
    """The output of layers with so many branches each."""
    streams = rule.start(x)
    number = 0
    for layer, branch_count in enumerate(branches):
        for branch in range(branch_count):
            place = BranchPlace(layer, branch, branch_count)
            y, streams = rule.read(streams, place)
            streams = rule.write(streams, place, branch_outputs(number, y))
            number += 1
    return rule.finish(streams)


def shaken(module: M) -> M:
    """The module in float64, with noise added to all of its weights."""
    module.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight += torch.randn(weight.shape, dtype=torch.double, generator=generator) * 0.3
    return module
