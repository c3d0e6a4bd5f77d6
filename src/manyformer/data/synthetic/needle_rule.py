"""A needle in random tokens."""

from typing import final

import numpy as np

from manyformer.config.data_sections import NeedleData
from manyformer.data.synthetic.synthetic_rule import (
    NOT_SCORED,
    SyntheticRows,
    SyntheticRule,
    distinct_draws,
    register_rule,
)
from manyformer.exact_shares import round_share
from manyformer.type_aliases import IntArray


@register_rule(NeedleData)
@final
class NeedleRule(SyntheticRule[NeedleData]):
    """Random tokens with keys and their values among them, and a key at the end (after RULER, Hsieh et al. 2024).

    The needle that is asked for stands at `depth`, the others anywhere. Symbols are noise, then keys, then values. A
    model whose window does not reach the needle answers by chance, `1 / values`, which is an oracle for windows."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        data = self.data
        symbols = random.integers(data.noise, size=(count, self.length))
        keys = data.noise + distinct_draws(random, data.keys, (count, data.needles))
        values = data.noise + data.keys + random.integers(data.values, size=(count, data.needles))
        columns = self._columns(random, count)
        np.put_along_axis(symbols, columns, keys, axis=1)
        np.put_along_axis(symbols, columns + 1, values, axis=1)
        symbols[:, -1] = keys[:, 0]
        targets = np.full_like(symbols, NOT_SCORED)
        targets[:, -1] = values[:, 0]
        return SyntheticRows(symbols, targets)

    def _columns(self, random: np.random.Generator, count: int) -> IntArray:
        """The column of the key of each needle, that which is asked for first: needles do not overlap."""
        needles, depth = self.data.needles, self.data.depth
        # a needle takes one of these places, and its value comes on top
        places = self.length - 1 - needles
        shape = (count, 1)
        asked = random.integers(places, size=shape) if depth is None else np.full(shape, round_share(depth, places - 1))
        others = distinct_draws(random, places - 1, (count, needles - 1))
        order = np.concatenate([asked, others + (others >= asked)], axis=1)
        columns: IntArray = order + (order[:, :, None] > order[:, None, :]).sum(axis=2)
        return columns

    def describe(self) -> str:
        depth = "any depth" if self.data.depth is None else f"depth {self.data.depth:g}"
        needles = "a needle" if self.data.needles == 1 else f"one of {self.data.needles} needles"
        return f"{needles} at {depth} of {self.length} tokens, asked for at the end; 1 of {self.data.values} by chance"
