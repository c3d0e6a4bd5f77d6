"""Word problems of groups against permutations that are multiplied one item at a time."""

from itertools import permutations

import numpy as np
import pytest

from manyformer.config.data_sections import StateTrackingData
from manyformer.data.generated.synthetic import make_rule


def is_even(permutation: tuple[int, ...]) -> bool:
    """Whether an even number of swaps sorts it."""
    items, swaps = list(permutation), 0
    for place in range(len(items)):
        while items[place] != place:
            target = items[place]
            items[place], items[target] = items[target], items[place]
            swaps += 1
    return swaps % 2 == 0


@pytest.mark.parametrize(("group", "items", "size"), [("S3", 3, 6), ("A5", 5, 60), ("S5", 5, 120)])
def test_products_are_those_of_permutations(group: str, items: int, size: int) -> None:
    elements = [p for p in permutations(range(items)) if group != "A5" or is_even(p)]
    data = StateTrackingData(group=group, length=30)  # type: ignore[arg-type]
    assert data.alphabet == len(elements) == size
    generated = make_rule(data).rows(np.random.default_rng(0), 50)
    for symbols, targets in zip(generated.symbols.tolist(), generated.targets.tolist()):
        product = tuple(range(items))
        for symbol, target in zip(symbols, targets):
            product = tuple(product[elements[symbol][item]] for item in range(items))
            assert elements[target] == product


@pytest.mark.parametrize(("group", "modulus"), [("parity", None), ("modular", 3), ("modular", 5)])
def test_sums_are_modular(group: str, modulus: int | None) -> None:
    data = StateTrackingData(group=group, modulus=modulus, length=25)  # type: ignore[arg-type]
    generated = make_rule(data).rows(np.random.default_rng(0), 50)
    assert set(np.unique(generated.symbols)) == set(range(modulus or 2))
    for symbols, targets in zip(generated.symbols.tolist(), generated.targets.tolist()):
        assert targets == [sum(symbols[: column + 1]) % (modulus or 2) for column in range(25)]


def test_the_last_product_alone_is_scored() -> None:
    every, last = (
        make_rule(StateTrackingData(group="S3", length=9, scored=scored)).rows(np.random.default_rng(4), 20)
        for scored in ("all", "last")
    )
    assert (every.symbols == last.symbols).all()
    assert (last.targets[:, :-1] == -1).all()
    assert (last.targets[:, -1] == every.targets[:, -1]).all()


def test_a_modulus_belongs_to_modular_counting() -> None:
    with pytest.raises(ValueError, match="is needed: the number of states of modular"):
        StateTrackingData(group="modular")
    with pytest.raises(ValueError, match="is for modular, and S3 has none"):
        StateTrackingData(group="S3", modulus=3)
