"""Binary numbers and their sums."""

from typing import final

import numpy as np

from manyformer.config.data_sections import AdditionData
from manyformer.data.synthetic.synthetic_rule import SyntheticRows, SyntheticRule, register_rule


@register_rule(AdditionData)
@final
class AdditionRule(SyntheticRule[AdditionData]):
    """Two binary numbers, lowest bits first, and the bits of their sum (Dehghani et al. 2019, section 3.3).

    A carry propagates while the two bits differ, which in some rows they nearly always do, so that dependencies can be
    long. Numbers start at a random position of the row, after zeros, so that training on short numbers covers all
    positions.
    """

    DIFFERENCE_RATES = (0.5, 0.7, 0.9, 0.97)

    def __init__(self, data: AdditionData) -> None:
        super().__init__(data)
        self._digits = data.digits

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        shape, column = (count, self.length), np.arange(self.length)
        different = random.random(shape) < random.choice(self.DIFFERENCE_RATES, size=(count, 1))
        start = random.integers(self.length - self._digits + 1, size=(count, 1))
        inside = (column >= start) & (column < start + self._digits)
        bits_a = random.integers(2, size=shape) * inside
        bits_b = (bits_a ^ different) * inside
        total, carry = np.empty_like(bits_a), np.zeros(count, np.int64)
        for index in column:
            bit_sum = bits_a[:, index] + bits_b[:, index] + carry
            total[:, index], carry = bit_sum % 2, bit_sum // 2
        return SyntheticRows(2 * bits_a + bits_b, np.where(inside, total, -1))

    def describe(self) -> str:
        return f"two numbers of {self._digits} bits and the bits of their sum; all are predictable"
