"""Rules whose answers follow from a state that every token changes: groups and automata."""

from itertools import permutations
from typing import final

import numpy as np

from manyformer.config.data_sections import RegularLanguageData, StateTrackingData
from manyformer.data.synthetic.synthetic_rule import (
    NOT_SCORED,
    SyntheticRows,
    SyntheticRule,
    distinct_draws,
    register_rule,
)
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
        self.table = (
            cyclic_table(self.symbols) if items is None else permutation_table(items, even_only=data.group == "A5")
        )

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        elements = random.integers(self.symbols, size=(count, self.length))
        products = elements.copy()
        for column in range(1, self.length):
            products[:, column] = self.table[products[:, column - 1], elements[:, column]]
        if self.data.scored == "last":
            products[:, :-1] = NOT_SCORED
        return SyntheticRows(elements, products)

    def describe(self) -> str:
        group = f"the sum modulo {self.symbols}" if self.data.group == "modular" else self.data.group
        return f"{group}: the product of all of {self.symbols} elements so far; all are predictable"


@register_rule(RegularLanguageData)
@final
class RegularLanguageRule(SyntheticRule[RegularLanguageData]):
    """Strings of a probabilistic automaton, with a mark after each (RegBench, Akyurek et al. 2024, section 3).

    Each row has an automaton of its own: in each state some symbols may follow, all equally likely, each of which leads
    to another state; strings begin in state 0 and end after a length drawn uniformly. The paper counts a
    prediction as right if the automaton allows it. Where just one symbol is allowed that is accuracy, and these
    positions are those of `scored: forced`."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        data, number = self.data, np.arange(count)
        shape = (count, data.max_states, data.edges)
        states = random.integers(data.min_states, data.max_states + 1, size=(count, 1))
        edges = random.integers(1, np.minimum(data.edges, states - 1) + 1, size=shape[:2])
        labels = distinct_draws(random, data.symbols, (count * data.max_states, data.edges)).reshape(shape)
        successors = self._successors(random, states)
        state, left = np.zeros(count, np.int64), np.zeros((count, data.max_states), bool)
        remaining = random.integers(1, data.max_string + 1, size=count)
        symbols = np.empty((count, self.length + 1), np.int64)
        forced = np.zeros((count, self.length + 1), bool)
        for column in range(self.length + 1):
            ends = remaining == 0
            edge = random.integers(edges[number, state])
            symbols[:, column] = np.where(ends, data.symbols, labels[number, state, edge])
            forced[:, column] = (edges[number, state] == 1) & left[number, state] & ~ends
            left[number, state] |= ~ends
            state = np.where(ends, 0, successors[number, state, edge])
            remaining = np.where(ends, random.integers(1, data.max_string + 1, size=count), remaining - 1)
        targets = symbols[:, 1:].copy()
        if data.scored == "forced":
            targets[~forced[:, 1:]] = NOT_SCORED
        return SyntheticRows(symbols[:, :-1].copy(), targets)

    def _successors(self, random: np.random.Generator, states: IntArray) -> IntArray:
        """For each row and state, states in random order: those that the row has first, and the own state last."""
        every = np.arange(self.data.max_states)
        keys = random.random((len(states), len(every), len(every)))
        keys += (every >= states)[:, None, :] + 2 * (every[:, None] == every)
        return keys.argsort(axis=2)[:, :, : self.data.edges]

    def describe(self) -> str:
        data = self.data
        states = f"{data.min_states} to {data.max_states} states"
        return f"strings of random automata with {states} and 1 to {data.edges} of {data.symbols} symbols in each"
