"""Groups of tokens: the rows that a group takes from a state, and how they are put back."""

from typing import Any

import torch

from manyformer.core import TokenPositions
from manyformer.depth.token_subset import AllTokens, TokenGroup, TokenSubset

POSITIONS = TokenPositions(torch.arange(4).expand(3, -1), torch.zeros(3, 4, dtype=torch.long))
STATE: Any = {"k": torch.arange(6.0).view(3, 2), "length": 7, "pair": (torch.ones(3), None)}


def advance(group: TokenGroup) -> Any:
    """The state after a step that adds 10 to the rows of the group."""
    rows = group.select_rows(STATE)
    return group.put_rows(STATE, {"k": rows["k"] + 10, "length": 7, "pair": (rows["pair"][0] + 10, None)})


def test_rows_without_chosen_tokens_keep_their_state() -> None:
    chosen = torch.zeros(3, 4, dtype=torch.bool)
    chosen[0, 1] = chosen[2, 3] = True
    group = TokenSubset(POSITIONS, chosen)
    assert len(group.select_rows(STATE)["k"]) == 2
    state = advance(group)
    assert state["k"].tolist() == [[10, 11], [2, 3], [14, 15]]
    assert state["pair"][0].tolist() == [11, 1, 11]
    assert (state["length"], state["pair"][1]) == (7, None)
    assert STATE["k"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_group_with_tokens_in_every_row_replaces_the_state() -> None:
    for group in (AllTokens(POSITIONS), TokenSubset(POSITIONS, torch.ones(3, 4, dtype=torch.bool))):
        assert advance(group)["k"].tolist() == [[10, 11], [12, 13], [14, 15]]
