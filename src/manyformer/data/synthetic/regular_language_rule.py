"""Strings of random automata, another one in each row."""

from typing import final

import numpy as np

from manyformer.config.data_sections import RegularLanguageData
from manyformer.data.synthetic.synthetic_rule import (
    NOT_SCORED,
    SyntheticRows,
    SyntheticRule,
    distinct_draws,
    register_rule,
)
from manyformer.type_aliases import IntArray


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
