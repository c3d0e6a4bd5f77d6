"""Numbers for pairs of positions: each way of asking gives what the table says."""

import pytest
import torch

from manyformer.core import ContiguousLayout, TokenPositions
from manyformer.mixers import FactorizedPairs, PairTable, PositionPairs, ToeplitzPairs

LONGEST, HEADS = 9, 2


def kinds() -> list[PositionPairs]:
    return [
        PairTable(LONGEST, heads=HEADS, std=1.0),
        FactorizedPairs(LONGEST, 3, heads=HEADS, std=1.0),
        ToeplitzPairs(LONGEST, heads=HEADS, std=1.0),
    ]


def dense(pairs: PositionPairs) -> torch.Tensor:
    """All numbers (h, l, s), by a loop."""
    actual = torch.empty(HEADS, LONGEST, LONGEST)
    for i in range(LONGEST):
        for j in range(LONGEST):
            if isinstance(pairs, PairTable):
                actual[:, i, j] = pairs.weight[:, i, j]
            elif isinstance(pairs, FactorizedPairs):
                actual[:, i, j] = (pairs.row[:, i] * pairs.column[:, j]).sum(-1)
            else:
                assert isinstance(pairs, ToeplitzPairs)
                actual[:, i, j] = pairs.weight[:, i - j + LONGEST - 1]
    return actual.detach()


def plain(start: int, length: int, rows: int = 3) -> TokenPositions:
    pos = torch.arange(start, start + length).expand(rows, -1)
    return TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout(start))


def scattered(*rows: list[int]) -> TokenPositions:
    pos = torch.tensor(rows)
    return TokenPositions(pos, torch.zeros_like(pos))


@pytest.mark.parametrize("kind", range(3))
def test_slices_and_lookups_say_the_same(kind: int) -> None:
    pairs = kinds()[kind]
    expected = dense(pairs)
    torch.testing.assert_close(pairs(plain(2, 4), plain(0, 6))[0], expected[:, 2:6, :6])
    at, of = scattered([0, 3, 8], [1, 1, 5]), scattered([2, 0], [7, 8])
    actual = pairs(at, of)
    assert actual.shape == (2, HEADS, 3, 2)
    for row in range(2):
        torch.testing.assert_close(actual[row], expected[:, at.position_ids[row][:, None], of.position_ids[row]])
    mixed = pairs(plain(4, 2, rows=2), of)
    for row in range(2):
        torch.testing.assert_close(mixed[row if len(mixed) > 1 else 0], expected[:, 4:6][..., of.position_ids[row]])


@pytest.mark.parametrize("kind", range(3))
def test_positions_that_do_not_exist_are_refused(kind: int) -> None:
    pairs = kinds()[kind]
    message = "position 9 does not exist: the model was built for max_length=9"
    with pytest.raises(ValueError, match=message):
        pairs(plain(0, 10), plain(0, 10))
    with pytest.raises(ValueError, match=message):
        pairs(plain(0, 2, rows=1), scattered([9]))


def test_they_start_as_large_as_asked_for() -> None:
    torch.manual_seed(0)
    for make in (
        lambda: PairTable(200, std=0.1),
        lambda: FactorizedPairs(200, 8, std=0.1),
        lambda: ToeplitzPairs(20000, std=0.1),
    ):
        pairs = make()
        actual = pairs.weight if isinstance(pairs, ToeplitzPairs) else pairs(plain(0, 200), plain(0, 200))
        assert float(actual.detach().std()) == pytest.approx(0.1, rel=0.1)
    assert not PairTable(4, std=1.0, trainable=False).weight.requires_grad
    with pytest.raises(ValueError, match=r"Table: max_length \(0\) must be at least 1"):
        PairTable(0, std=1.0)
