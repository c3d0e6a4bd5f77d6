"""Rules whose answers follow from a state that every token changes: parity, counting, and permutations."""

from itertools import permutations
from typing import final

import numpy as np

from manyformer.config.data_sections import StateTrackingData
from manyformer.data.synthetic.synthetic_rule import NOT_SCORED, SyntheticRows, SyntheticRule, register_rule
from manyformer.type_aliases import IntArray


def cyclic_table(size: int) -> IntArray:
    """The sums modulo `size` of all pairs of numbers below it."""
    return np.add.outer(np.arange(size), np.arange(size)) % size


def permutation_table(items: int, *, even_only: bool = False) -> IntArray:
    """The products of all pairs of permutations, in lexicographic order, of which 0 is the identity.

    The product of p and q takes item i to p[q[i]]."""
    elements = np.array(list(permutations(range(items))))
    if even_only:
        inversions = np.triu(elements[:, :, None] > elements[:, None, :], 1).sum(axis=(1, 2))
        elements = elements[inversions % 2 == 0]
    weights = items ** np.arange(items - 1, -1, -1)
    # composed[p, q, i] = elements[p, elements[q, i]]; the codes ascend, as the order is lexicographic
    composed = elements[:, elements]
    return np.searchsorted(elements @ weights, composed @ weights)


@register_rule(StateTrackingData)
@final
class StateTrackingRule(SyntheticRule[StateTrackingData]):
    """Uniformly drawn elements of a group; targets are the products of all so far (Merrill et al. 2024, section 5).

    Linear recurrences whose eigenvalues are positive cannot compute parity at every length (Grazzi et al. 2025, theorem
    1). The word problems of A5 and S5 are complete for NC1, unlike those of S3 and of counting."""

    def __init__(self, data: StateTrackingData) -> None:
        super().__init__(data)
        items = {"S3": 3, "A5": 5, "S5": 5}.get(data.group)
        if items is None:
            self.table = cyclic_table(self.symbols)
        else:
            self.table = permutation_table(items, even_only=data.group == "A5")

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        elements = random.integers(self.symbols, size=(count, self.length))
        products = elements.copy()
        for column in range(1, self.length):
            products[:, column] = self.table[products[:, column - 1], elements[:, column]]
        if self.data.scored == "last":
            products[:, :-1] = NOT_SCORED
        return SyntheticRows(elements, products)

    def describe(self) -> str:
        if self.data.group == "modular":
            group = f"the sum modulo {self.symbols}"
        else:
            group = self.data.group
        return f"{group}: the product of all of {self.symbols} elements so far; all are predictable"
