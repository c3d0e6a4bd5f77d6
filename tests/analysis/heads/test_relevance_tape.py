"""Relevance equals the formula over the explicit Jacobian of each operation, one sample at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyformer.analysis.heads.relevance_tape import RelevanceTape

EPSILON = 1e-5


def explicit(function: Callable[..., Tensor], relevance: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The relevance of the inputs of one sample, by the full matrix of impacts of all inputs on all outputs."""
    jacobians = torch.autograd.functional.jacobian(function, inputs)
    zero = function(*(torch.zeros_like(x) for x in inputs)).flatten()
    columns = [j.reshape(len(zero), -1) * x.flatten() for j, x in zip(jacobians, inputs)]
    impacts = torch.cat(columns, 1)
    impacts = impacts + zero[:, None] / impacts.shape[1]
    positive, negative = impacts.clamp(min=0), impacts.clamp(max=0)
    shares = positive / (positive.sum(1, keepdim=True) + EPSILON) / 2
    shares = shares + negative / (negative.sum(1, keepdim=True) - EPSILON) / 2
    result = relevance.flatten() @ shares
    result = result * relevance.abs().sum() / result.abs().sum()
    return [part.view_as(x) for part, x in zip(result.split([x.numel() for x in inputs]), inputs)]


def propagated(function: Callable[..., Tensor], relevance: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    tape = RelevanceTape()
    for x in inputs:
        tape.track(x)
    with torch.no_grad(), tape:
        output = function(*inputs)
    relevances = tape.propagate(output, relevance)
    return [relevances[id(x)] for x in inputs]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


WEIGHT, OFFSET = randn(5, 4), randn(5, seed=1)
GAIN, SHIFT = randn(4, seed=2), randn(4, seed=3)
BY_TOKEN: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    # a function of the last axis, the width of its output, and how many inputs it has
    "linear": (lambda x: F.linear(x, WEIGHT, OFFSET), 5, 1),
    "linear without offset": (lambda x: F.linear(x, WEIGHT), 5, 1),
    "layer norm": (lambda x: F.layer_norm(x, (4,), GAIN, SHIFT), 4, 1),
    "rms norm": (lambda x: F.rms_norm(x, (4,), GAIN), 4, 1),
    "sum": (lambda x, y: x + y, 4, 2),
    "sum with a constant": (lambda x: x + SHIFT, 4, 1),
    "product": (lambda x, y: x * y, 4, 2),
    "product with a constant": (lambda x: x * SHIFT, 4, 1),
}


@pytest.mark.parametrize("name", BY_TOKEN)
def test_tokens_get_what_the_explicit_jacobian_gives(name: str) -> None:
    function, width, count = BY_TOKEN[name]
    inputs = tuple(randn(2, 3, 4, seed=number) for number in range(count))
    # two targets, one of which has relevance of both signs; some outputs have none
    relevance = torch.stack([randn(2, 3, width).abs(), randn(2, 3, width, seed=7) * (randn(2, 3, width) > 0)])
    actual = propagated(function, relevance, inputs)
    for target in range(2):
        for row in range(2):
            for token in range(3):
                expected = explicit(function, relevance[target, row, token], tuple(x[row, token] for x in inputs))
                for part, full in zip(expected, actual):
                    torch.testing.assert_close(full[target, row, token], part, rtol=1e-5, atol=1e-8)


def test_a_sum_over_tokens_gives_rows_what_the_explicit_jacobian_gives() -> None:
    x, relevance = randn(2, 3, 4), randn(1, 2, 4, seed=1)
    [actual] = propagated(lambda x: x.sum(1), relevance, (x,))
    for row in range(2):
        [expected] = explicit(lambda x: x.sum(0), relevance[0, row], (x[row],))
        torch.testing.assert_close(actual[0, row], expected, rtol=1e-5, atol=1e-8)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


BIAS = randn(1, 1, 4, 5, seed=5)
MASK = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool)
ATTENTION: dict[str, dict[str, Any]] = {
    "all keys": {},
    "scale": {"scale": 0.9},
    "mask": {"attn_mask": MASK[None, None]},
    "bias": {"attn_mask": BIAS},
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("impacts", [1, 1 << 22], ids=["one query at a time", "all at once"])
def test_each_head_gets_what_the_explicit_jacobian_gives(
    name: str, impacts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyformer.analysis.heads.relevance_tape.MAX_IMPACTS", impacts)
    options, keys = ATTENTION[name], 4 if name == "causal" else 5
    q, k, v = randn(2, 2, 4, 3), randn(2, 2, keys, 3, seed=1), randn(2, 2, keys, 2, seed=2)
    relevance = torch.stack([randn(2, 2, 4, 2).abs(), randn(2, 2, 4, 2, seed=4)])
    actual = propagated(lambda q, k, v: attend(q, k, v, **options), relevance, (q, k, v))
    one_row = {**options, **({"attn_mask": options["attn_mask"][0]} if "attn_mask" in options else {})}
    for target in range(2):
        for row in range(2):
            for head in range(2):
                arguments = tuple(x[row, head][None] for x in (q, k, v))
                expected = explicit(
                    lambda q, k, v: attend(q, k, v, **one_row), relevance[target, row, head][None], arguments
                )
                for part, full in zip(expected, actual):
                    torch.testing.assert_close(full[target, row, head], part[0], rtol=1e-5, atol=1e-8)


def test_heads_that_share_keys_add_their_relevance() -> None:
    q, k, v = randn(1, 4, 3, 2), randn(1, 2, 3, 2, seed=1), randn(1, 2, 3, 2, seed=2)
    relevance = randn(1, 1, 4, 3, 2).abs()
    shared = propagated(lambda q, k, v: attend(q, k, v, enable_gqa=True), relevance, (q, k, v))
    copies = propagated(attend, relevance, (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    torch.testing.assert_close(shared[0], copies[0])
    for actual, expected in zip(shared[1:], copies[1:]):
        torch.testing.assert_close(actual, expected.unflatten(2, (2, 2)).sum(3))
