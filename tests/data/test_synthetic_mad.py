"""The six tasks of MAD against definitions written out."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from manyformer.config import SyntheticData
from manyformer.config.data_sections import (
    MADCompressionData,
    MADCopyData,
    MADFuzzyRecallData,
    MADMemorizationData,
    MADNoisyRecallData,
    MADRecallData,
)
from manyformer.data.generated.synthetic import make_rule


def rows_of(data: SyntheticData, count: int = 100, seed: int = 1) -> list[tuple[list[int], list[int]]]:
    generated = make_rule(data).rows(np.random.default_rng(seed), count)
    return list(zip(generated.symbols.tolist(), generated.targets.tolist(), strict=True))


@pytest.mark.parametrize("data", [MADRecallData(length=40), MADNoisyRecallData(length=40, noise_share=0.4)])
def test_values_of_keys_seen_before_are_asked_for(data: MADRecallData | MADNoisyRecallData) -> None:
    pairs_of_noise = 0
    for symbols, targets in rows_of(data):
        values: dict[int, int] = {}
        for column in range(0, 40, 2):
            key, value = symbols[column : column + 2]
            assert targets[column + 1] == -1
            if key >= 2 * data.keys:
                assert value >= 2 * data.keys
                assert targets[column] == -1
                pairs_of_noise += 1
                continue
            assert key < data.keys <= value < 2 * data.keys
            assert targets[column] == values.get(key, -1)
            assert values.setdefault(key, value) == value
        assert targets[38] >= 0, "the last key came before"
    assert pairs_of_noise / 2000 == pytest.approx(0.4 * 18 / 20 if data.noise_symbols else 0, abs=0.04)


@pytest.mark.parametrize("min_key", [1, 3])
def test_fuzzy_keys_have_the_values_that_they_had(min_key: int) -> None:
    data, lengths = MADFuzzyRecallData(length=64, min_key=min_key), Counter[int]()
    for symbols, targets in rows_of(data):
        start = next(column for column, symbol in enumerate(symbols) if symbol != 15)
        assert set(targets[:start]) <= {-1}
        values: dict[tuple[int, ...], tuple[int, ...]] = {}
        column = start
        while column < 64:
            stop = next(place for place in range(column, 64) if symbols[place] >= 7)
            end = next((place for place in range(stop, 64) if symbols[place] < 7), 64)
            key, value = tuple(symbols[column:stop]), tuple(symbols[stop:end])
            assert len(set(key)) == len(key)
            assert len(set(value)) == len(value) <= 3
            # the values of one token each are predicted from the token before
            expected = value if key in values else (-1,) * len(value)
            assert tuple(targets[stop - 1 : end - 1]) == expected
            assert set(targets[column : stop - 1]) <= {-1}
            assert values.setdefault(key, value) == value
            lengths[len(key)] += 1
            column = end
        assert targets[63] == -1
        assert targets[62] >= 0, "the last pair came before"
    assert set(lengths) == set(range(min_key, 4))


def test_symbols_among_blanks_are_copied() -> None:
    for symbols, targets in rows_of(MADCopyData(symbols=8, length=30, copied=5)):
        content = [symbol for symbol in symbols[:24] if symbol < 6]
        assert len(content) == 5
        assert symbols[24] == 7
        assert symbols[25:] == [6] * 5
        assert targets == [-1] * 25 + content
    columns = Counter(
        column
        for symbols, _ in rows_of(MADCopyData(symbols=8, length=30, copied=5), 400)
        for column, symbol in enumerate(symbols[:24])
        if symbol < 6
    )
    assert max(columns) == 23
    assert min(columns) < 3


def test_symbols_are_asked_for_by_their_positions() -> None:
    for symbols, targets in rows_of(MADCompressionData(symbols=7, length=13)):
        content, questions = symbols[:6], symbols[7:]
        assert symbols[6] == 6
        assert sorted(questions) == list(range(7, 13))
        assert targets == [-1] * 7 + [content[question - 7] for question in questions]


def test_values_are_the_same_in_all_rows_of_a_seed() -> None:
    tables = []
    for seed in (0, 1):
        table: dict[int, int] = {}
        for rows in (rows_of(MADMemorizationData(symbols=21, length=8, seed=seed), seed=draw) for draw in (2, 3)):
            for symbols, targets in rows:
                assert symbols[1::2] == [20] * 4
                assert targets[::2] == [-1] * 4
                for key, value in zip(symbols[::2], targets[1::2]):
                    assert table.setdefault(key, value) == value
        assert sorted(table) == list(range(10))
        assert sorted(table.values()) == list(range(10, 20))
        tables.append(table)
    assert tables[0] != tables[1]


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (MADRecallData, {"length": 9}, "must be even"),
        (MADNoisyRecallData, {"symbols": 18}, "must leave at least 4 symbols"),
        (MADFuzzyRecallData, {"key_length": 8}, "must be at least 17"),
        (MADFuzzyRecallData, {"min_key": 4}, "must be at most data.key_length"),
        (MADFuzzyRecallData, {"length": 23}, "must be at least 24"),
        (MADCopyData, {"length": 32}, "must be at least 33"),
        (MADCompressionData, {"length": 2}, "must be at least 3"),
        (MADMemorizationData, {"length": 7}, "must be even"),
    ],
)
def test_what_does_not_fit_is_refused(section: type[SyntheticData], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section(**settings)
