"""Rules of recall against definitions written out: pairs, needles and copies, with every setting that changes them."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from manyformer.config import SyntheticData
from manyformer.config.data_sections import CopyData, MQARData, NeedleData
from manyformer.data.generated.synthetic import make_rule


def rows_of(data: SyntheticData, count: int = 200, seed: int = 1) -> list[tuple[list[int], list[int]]]:
    generated = make_rule(data).rows(np.random.default_rng(seed), count)
    return list(zip(generated.symbols.tolist(), generated.targets.tolist(), strict=True))


def test_queries_ask_for_the_values_of_a_dictionary() -> None:
    for symbols, targets in rows_of(MQARData(symbols=64, length=48, pairs=6)):
        values = dict(zip(symbols[0:12:2], symbols[1:12:2]))
        assert len(values) == len(set(values.values())) == 6
        assert all(1 <= key < 32 for key in values)
        assert all(32 <= value < 64 for value in values.values())
        queries = [column for column, target in enumerate(targets) if target >= 0]
        assert sorted(symbols[column] for column in queries) == sorted(values)
        assert all(column >= 12 and column % 2 == 0 for column in queries)
        assert [targets[column] for column in queries] == [values[symbols[column]] for column in queries]


def test_queries_stand_where_the_power_law_puts_them() -> None:
    slots, power = 6, 0.01
    drawn = Counter(
        (column - 2) // 2
        for _, targets in rows_of(MQARData(symbols=16, length=14, pairs=1, power=power), 4000)
        for column, target in enumerate(targets)
        if target >= 0
    )
    weights = [distance ** (power - 1) for distance in range(1, slots + 1)]
    for slot, weight in enumerate(weights):
        assert drawn[slot] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_numbers_of_pairs_are_mixed() -> None:
    counts = Counter(sum(target >= 0 for target in targets) for _, targets in rows_of(MQARData(pairs=(2, 8)), 400))
    assert set(counts) == {2, 8}
    assert counts[2] == pytest.approx(200, abs=50)


@pytest.mark.parametrize(("depth", "needles"), [(0.0, 1), (0.5, 3), (1.0, 3), (None, 1), (None, 4)])
def test_the_needle_asked_for_stands_at_its_depth(depth: float | None, needles: int) -> None:
    data = NeedleData(length=20, noise=5, keys=6, values=7, needles=needles, depth=depth)
    columns = set()
    for symbols, targets in rows_of(data):
        keys = {column: symbol for column, symbol in enumerate(symbols[:-1]) if 5 <= symbol < 11}
        assert len(set(keys.values())) == len(keys) == needles
        assert all(symbols[column + 1] >= 11 for column in keys)
        assert sum(symbol < 5 for symbol in symbols) == 19 - 2 * needles
        (column,) = (column for column, key in keys.items() if key == symbols[-1])
        assert targets == [-1] * 19 + [symbols[column + 1]]
        columns.add(column)
    if depth == 0.0:
        assert columns == {0}
    elif depth == 1.0:
        assert columns == {17}
    elif depth is None and needles == 1:
        assert columns == set(range(18))


@pytest.mark.parametrize("order", ["same", "reversed", "sorted"])
def test_strings_are_answered_in_their_order(order: Any) -> None:
    lengths = set()
    for symbols, targets in rows_of(CopyData(symbols=9, length=16, min_string=2, order=order)):
        length = symbols.index(9)
        string = symbols[:length]
        answer = {"same": string, "reversed": string[::-1], "sorted": sorted(string)}[order]
        padding = 16 - 2 * length - 1
        assert symbols == [*string, 9, *answer, *[-1] * padding]
        assert targets == [*[-1] * length, *answer, 10, *[-1] * padding]
        lengths.add(length)
    assert lengths == set(range(2, 8))


def test_a_string_is_as_long_as_fits() -> None:
    assert all(symbols.index(9) == 7 for symbols, _ in rows_of(CopyData(symbols=9, length=15)))


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (MQARData, {"length": 16, "pairs": 5}, "must be at most data.length / 4"),
        (MQARData, {"length": 15, "pairs": 2}, "must be even"),
        (MQARData, {"symbols": 16, "pairs": 8}, "must be at least 18: 8 pairs have keys that differ"),
        (MQARData, {"pairs": ()}, "must be a whole number or a list"),
        (NeedleData, {"needles": 17}, "must be at most data.keys"),
        (NeedleData, {"needles": 4, "length": 8}, "must be at least 9"),
        (CopyData, {"length": 2}, "must be at least 3"),
        (CopyData, {"length": 9, "min_string": 5}, "must be at most 4"),
    ],
)
def test_what_does_not_fit_is_refused(section: type[SyntheticData], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section(**settings)
