"""Tokens sent to experts give what all experts on all tokens give, and capacity drops what a loop would drop."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from manyformer.nn.feed_forward import FeedForwardExperts, GatedExperts
from manyformer.nn.feed_forward.expert_groups import (
    NO_EXPERT,
    dispatch,
    dispatch_in_blocks,
    dispatch_in_groups,
    dispatch_reference,
    drop_overflow,
)

EXPERTS = 5


def dispatch_by_counts(*arguments: Any) -> Tensor:
    return dispatch(*arguments, host_reads=True)


@pytest.mark.parametrize("kind", [GatedExperts, FeedForwardExperts])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("way", [dispatch_by_counts, dispatch_in_groups, dispatch_in_blocks])
def test_sorted_dispatch_is_its_definition(kind: type[GatedExperts], tokens: int, way: Callable[..., Tensor]) -> None:
    if not tokens and way is not dispatch_by_counts:
        pytest.skip("without tokens the host knows all numbers")
    # torch's grouped product knows no float64
    dtype, tolerance = (torch.float, 2e-5) if way is dispatch_in_groups else (torch.double, 1e-12)
    experts = kind(EXPERTS, 8, 16, bias=True).to(dtype)
    x = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    scores = torch.rand(tokens, EXPERTS, dtype=dtype)
    # expert 3 is never hit, and some tokens have one expert only
    scores[:, 3] = -1
    weights, chosen = scores.topk(2)
    chosen[::3, 1] = NO_EXPERT
    weights = weights.clone().requires_grad_()
    direction = torch.randn(tokens, 8, dtype=dtype)
    results = []
    for run in (way, dispatch_reference):
        y = run(x, chosen, weights, experts, EXPERTS)
        inputs = [x, weights, *experts.parameters()]
        results.append([y, *torch.autograd.grad((y * direction).sum(), inputs)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("way", [dispatch_by_counts, dispatch_in_groups, dispatch_in_blocks])
def test_an_expert_without_tokens_has_a_gradient_of_zeros(way: Callable[..., Tensor]) -> None:
    experts = GatedExperts(3, 4, 4)
    x = torch.randn(6, 4)
    way(x, torch.zeros(6, 1, dtype=torch.long), torch.ones(6, 1), experts, 3).sum().backward()
    for weight in experts.parameters():
        assert weight.grad is not None
        assert weight.grad[0].any()
        assert not weight.grad[1:].any()


def drop_by_loop(experts: Tensor, documents: Tensor, factor: float) -> Tensor:
    left = {
        (document, expert): math.ceil(factor * int((documents == document).sum()) * experts.shape[1] / EXPERTS)
        for document in documents.unique().tolist()
        for expert in range(EXPERTS)
    }
    result = experts.clone()
    for token, document in enumerate(documents.tolist()):
        for choice in range(experts.shape[1]):
            key = (document, int(experts[token, choice]))
            if left.setdefault(key, 0) <= 0:
                result[token, choice] = NO_EXPERT
            left[key] -= 1
    return result


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 5.0])
def test_capacity_drops_the_last_tokens_of_a_document(factor: float) -> None:
    documents = torch.tensor([0] * 9 + [1] * 4 + [2] * 10)
    experts = torch.rand(23, EXPERTS).pow(3).topk(2).indices
    dropped = drop_overflow(experts, documents, EXPERTS, factor)
    assert torch.equal(dropped, drop_by_loop(experts, documents, factor))
    assert (dropped == NO_EXPERT).any() == (factor < 5)


def test_capacity_is_that_of_switch() -> None:
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

    # the class has a fixed capacity for each row, here 1.25 times 24 / 5
    capacity = math.ceil(1.25 * 24 / EXPERTS)
    reference = SwitchTransformersTop1Router(
        SwitchTransformersConfig(num_experts=EXPERTS, expert_capacity=capacity, d_model=8)
    ).eval()
    x = torch.randn(3, 24, 8)
    mask, _, _ = reference(x)
    expected = torch.where(mask.any(-1), mask.long().argmax(-1), NO_EXPERT)
    chosen = reference.classifier(x).argmax(-1)
    documents = torch.arange(3)[:, None].expand(3, 24).flatten()
    actual = drop_overflow(chosen.flatten()[:, None], documents, EXPERTS, 1.25)
    assert (expected == NO_EXPERT).any()
    assert torch.equal(actual.view(3, 24), expected)
