"""Shares of whole numbers are those of the decimal that was written, never one more or less by rounding."""

import math
from fractions import Fraction

import pytest
import torch

from manyformer.nn.feed_forward.expert_groups import drop_overflow
from manyformer.nn.runtime.exact_shares import ceil_share, ceil_shares, floor_share, round_share

SHARES = ("0.01", "0.07", "0.1", "0.125", "0.29", "0.3", "0.55", "0.57", "0.58", "0.9", "1.05", "1.1", "1.2", "1.25")


@pytest.mark.parametrize("text", SHARES)
def test_shares_are_those_of_the_decimal(text: str) -> None:
    share, totals = float(text), [*range(400), 4096, 99_999, 10**9]
    exact = [Fraction(text) * total for total in totals]
    assert [floor_share(share, total) for total in totals] == list(map(math.floor, exact))
    assert [ceil_share(share, total) for total in totals] == list(map(math.ceil, exact))
    assert [round_share(share, total) for total in totals] == list(map(round, exact))
    assert ceil_shares(share, torch.tensor(totals)).tolist() == list(map(math.ceil, exact))


def test_floating_point_would_be_wrong() -> None:
    """The cases stand here because they are: otherwise the tests above show nothing."""
    assert math.floor(0.29 * 100) == 28
    assert math.ceil(0.07 * 100) == 8
    assert int((torch.tensor([50]) * (1.2 / 4)).ceil()) == 16
    assert (floor_share(0.29, 100), ceil_share(0.07, 100), ceil_share(Fraction("1.2") / 4, 50)) == (29, 7, 15)


def test_a_decimal_of_many_digits_is_exact_too() -> None:
    share = 0.1234567890123456
    totals = torch.tensor([[3, 10**9], [0, 2**31 - 1]])
    expected = [[math.ceil(Fraction("0.1234567890123456") * total) for total in row] for row in totals.tolist()]
    assert ceil_shares(share, totals).tolist() == expected


@pytest.mark.parametrize("factor", ["1.0", "1.05", "1.2", "1.25", "0.7"])
@pytest.mark.parametrize(("per_token", "num_experts"), [(1, 4), (1, 10), (2, 6), (2, 64), (1, 3)])
def test_the_capacity_of_an_expert_is_exact(factor: str, per_token: int, num_experts: int) -> None:
    for tokens in [*range(1, 120), 1000, 4096]:
        capacity = math.ceil(Fraction(factor) * tokens * per_token / num_experts)
        # all tokens choose the same experts
        experts = torch.arange(per_token).expand(tokens, -1)
        kept = drop_overflow(experts, torch.zeros(tokens, dtype=torch.long), num_experts, float(factor))
        assert (kept >= 0).sum(0).tolist() == [min(tokens, capacity)] * per_token
