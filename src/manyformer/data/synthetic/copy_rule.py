"""Strings and their copies, reversed copies and sorted copies."""

from typing import final

import numpy as np

from manyformer.config.data_sections import CopyData
from manyformer.data.synthetic.synthetic_rule import (
    NOT_SCORED,
    PADDING_SYMBOL,
    SyntheticRows,
    SyntheticRule,
    register_rule,
)
from manyformer.type_aliases import IntArray


@register_rule(CopyData)
@final
class CopyRule(SyntheticRule[CopyData]):
    """A random string, a mark, the string again in some order, an end mark (Jelassi et al. 2024, section 3).

    The answer and the end mark are scored: a model with a state of fixed size fails on strings beyond its capacity, and
    the end mark shows whether it counts. Symbols are those of strings, then the mark, then the end mark."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        data, longest = self.data, self.data.max_string
        shortest = longest if data.min_string is None else data.min_string
        length = random.integers(shortest, longest + 1, size=(count, 1))
        strings = random.integers(data.symbols, size=(count, longest))
        row, column = np.nonzero(np.arange(longest) < length)
        answers, start = self._answers(strings, length)[row, column], length[row, 0]
        symbols = np.full((count, self.length), PADDING_SYMBOL)
        targets = np.full_like(symbols, NOT_SCORED)
        symbols[row, column], symbols[row, start + 1 + column] = strings[row, column], answers
        targets[row, start + column] = answers
        np.put_along_axis(symbols, length, data.symbols, axis=1)
        np.put_along_axis(targets, 2 * length, data.symbols + 1, axis=1)
        return SyntheticRows(symbols, targets)

    def _answers(self, strings: IntArray, length: IntArray) -> IntArray:
        """The strings in the order of the answer; what is behind their `length` is arbitrary."""
        column = np.arange(strings.shape[1])
        if self.data.order == "same":
            return strings
        if self.data.order == "reversed":
            return np.take_along_axis(strings, np.maximum(length - 1 - column, 0), axis=1)
        return np.sort(np.where(column < length, strings, self.data.symbols), axis=1)

    def describe(self) -> str:
        shortest, longest = self.data.min_string, self.data.max_string
        lengths = str(longest) if shortest in (None, longest) else f"{shortest} to {longest}"
        order = {"same": "copied", "reversed": "reversed", "sorted": "sorted"}[self.data.order]
        return f"strings of {lengths} out of {self.data.symbols} symbols, {order}; all answers are predictable"
