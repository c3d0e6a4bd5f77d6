"""Sequences that repeat a random word."""

from typing import final

import numpy as np

from manyformer.config.data_sections import DuplicateData
from manyformer.data.synthetic.synthetic_rule import SyntheticRows, SyntheticRule, register_rule


@register_rule(DuplicateData)
@final
class DuplicateRule(SyntheticRule[DuplicateData]):
    """A separator and a random word, both repeated: 0w0w (Kitaev et al. 2020, section 4, "duplication task").

    It tests attention that must find one token among many, half a row away: each symbol of the second copy follows
    from the first. Only the second copy is scored. Symbol 0 is the separator.
    """

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        half = self.length // 2
        word = random.integers(1, self.symbols, size=(count, half))
        word[:, 0] = 0
        symbols = np.concatenate([word, word], axis=1)
        targets = np.full_like(symbols, -1)
        targets[:, half:-1] = word[:, 1:]
        return SyntheticRows(symbols, targets)

    def describe(self) -> str:
        length = self.length // 2 - 1
        return f"a word of {length} out of {self.symbols - 1} symbols, repeated once; the copy is predictable"
