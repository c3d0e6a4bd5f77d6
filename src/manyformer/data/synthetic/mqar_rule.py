"""Multi-query associative recall (MQAR)."""

from typing import final

import numpy as np

from manyformer.config.data_sections import MQARData
from manyformer.data.synthetic.synthetic_rule import (
    NOT_SCORED,
    SyntheticRows,
    SyntheticRule,
    distinct_draws,
    register_rule,
)
from manyformer.type_aliases import IntArray


@register_rule(MQARData)
@final
class MQARRule(SyntheticRule[MQARData]):
    """Pairs of a key and a value, then each key once more among random tokens (Arora et al. 2023, section 3).

    As in the authors' code: all keys and all values of a row differ; queries stand at even distances behind the pairs,
    drawn without replacement by a power law; only queries are scored; other tokens are any symbols. Our rows are new
    at every step, where theirs are a data set of fixed size."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        symbols = random.integers(self.symbols, size=(count, self.length))
        targets = np.full_like(symbols, NOT_SCORED)
        counts = self.data.pair_counts
        pairs_of_row = random.choice(counts, size=count)
        for pairs in counts:
            rows = np.flatnonzero(pairs_of_row == pairs)
            symbols[rows], targets[rows] = self._fill(random, symbols[rows], targets[rows], pairs)
        return SyntheticRows(symbols, targets)

    def _fill(
        self, random: np.random.Generator, symbols: IntArray, targets: IntArray, pairs: int
    ) -> tuple[IntArray, IntArray]:
        rows, half = len(symbols), self.symbols // 2
        keys = 1 + distinct_draws(random, half - 1, (rows, pairs))
        values = half + distinct_draws(random, self.symbols - half, (rows, pairs))
        symbols[:, 0 : 2 * pairs : 2], symbols[:, 1 : 2 * pairs : 2] = keys, values
        slots = (self.length - 2 * pairs) // 2
        weights = np.arange(1, slots + 1) ** (self.data.power - 1)
        # the smallest of exponential variables, each divided by its weight, are weighted draws without replacement
        order = (random.standard_exponential((rows, slots)) / weights).argsort(axis=1)[:, :pairs]
        columns = 2 * pairs + 2 * order
        np.put_along_axis(symbols, columns, keys, axis=1)
        np.put_along_axis(targets, columns, values, axis=1)
        return symbols, targets

    def describe(self) -> str:
        pairs = " or ".join(map(str, self.data.pair_counts))
        return (
            f"{pairs} pairs of a key and a value out of {self.symbols} symbols; the value of each query is predictable"
        )
