"""Groups of tokens: what is gathered, and what is scattered back."""

from typing import Any

import torch

from manyformer.core import TokenPositions
from manyformer.depth.token_subset import AllTokens, TokenSubset

POSITIONS = TokenPositions(torch.arange(4).expand(3, -1), torch.zeros(3, 4, dtype=torch.long))
STATE: Any = {"k": torch.arange(6.0).view(3, 2), "length": 7, "pair": (torch.ones(3), None)}
CHOSEN = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]]).bool()


def test_rows_without_chosen_tokens_are_left_out() -> None:
    state = TokenSubset(POSITIONS, CHOSEN).select_rows(STATE)
    assert state["k"].tolist() == [[0, 1], [4, 5]]
    assert (state["length"], len(state["pair"][0]), state["pair"][1]) == (7, 2, None)


def test_a_group_with_tokens_in_every_row_has_the_entire_state() -> None:
    for group in (AllTokens(POSITIONS), TokenSubset(POSITIONS, torch.ones(3, 4, dtype=torch.bool))):
        assert group.select_rows(STATE) is STATE


def test_only_the_tokens_of_the_group_change() -> None:
    x = torch.arange(12.0).view(3, 4, 1)
    for group in (AllTokens(POSITIONS, CHOSEN), TokenSubset(POSITIONS, CHOSEN)):
        torch.testing.assert_close(group.scatter(x, group.gather(x) + 10), x + 10 * CHOSEN[..., None])
