"""Sequences with a marked symbol that is asked for at the end."""

from typing import final

import numpy as np

from manyformer.config.data_sections import MarkedData
from manyformer.data.synthetic.synthetic_rule import SyntheticRows, SyntheticRule, register_rule
from manyformer.errors import UserError


@register_rule(MarkedData)
@final
class MarkedRule(SyntheticRule[MarkedData]):
    """One of the first `REGION_LENGTH` symbols is marked, and is the target in the last `REGION_LENGTH` positions.

    Half of the symbols are values, as many are the same values with a mark, and the last symbol is the query.
    """

    REGION_LENGTH = 8

    def __init__(self, data: MarkedData) -> None:
        super().__init__(data)
        self._values = (data.symbols - 1) // 2
        if self.length <= 2 * self.REGION_LENGTH:
            raise UserError(
                f"sequences of {self.length} tokens are too short for the rule 'marked', which needs more than "
                f"{2 * self.REGION_LENGTH}; set data.length higher"
            )

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        symbols = random.integers(self._values, size=(count, self.length))
        rows, column = np.arange(count), random.integers(self.REGION_LENGTH, size=count)
        answers = symbols[rows, column]
        symbols[rows, column] += self._values
        symbols[:, -self.REGION_LENGTH :] = 2 * self._values
        targets = np.full_like(symbols, -1)
        targets[:, -self.REGION_LENGTH :] = answers[:, None]
        return SyntheticRows(symbols, targets)

    def describe(self) -> str:
        return f"one of {self._values} values marked at the start and queried {self.length} positions later"
