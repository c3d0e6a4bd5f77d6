"""Sequences that repeat a cycle."""

from typing import final

import numpy as np

from manyformer.config.data_sections import PeriodicData
from manyformer.data.synthetic.synthetic_rule import SyntheticRows, SyntheticRule, register_rule


@register_rule(PeriodicData)
@final
class PeriodicRule(SyntheticRule[PeriodicData]):
    """A repeated cycle of `period` random symbols: each equals the symbol `period` positions back.

    A model predicts it only if its attention reaches that far.
    """

    def __init__(self, data: PeriodicData) -> None:
        super().__init__(data)
        self._period = data.period

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        cycle = random.integers(self.symbols, size=(count, self._period))
        sequences = cycle[:, np.arange(self.length + 1) % self._period]
        return SyntheticRows(sequences[:, :-1].copy(), sequences[:, 1:].copy())

    def describe(self) -> str:
        return f"a repeated cycle of {self._period} out of {self.symbols} symbols; every repetition is predictable"
