"""Rules whose answers stand in the sequence: recall of values by their keys, a needle, copies."""

from typing import final

import numpy as np

from manyformer.base.type_aliases import IntArray
from manyformer.config.data_sections import CopyData, MQARData, NeedleData
from manyformer.data.generated.synthetic.synthetic_rule import (
    NOT_SCORED,
    PADDING_SYMBOL,
    SyntheticRows,
    SyntheticRule,
    distinct_draws,
    register_rule,
)
from manyformer.nn.runtime.exact_shares import round_share


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
        # rows with equally many pairs are filled together
        for pairs in counts:
            rows = np.flatnonzero(pairs_of_row == pairs)
            symbols[rows], targets[rows] = self._fill(random, symbols[rows], targets[rows], pairs)
        return SyntheticRows(symbols, targets)

    def _fill(
        self, random: np.random.Generator, symbols: IntArray, targets: IntArray, pairs: int
    ) -> tuple[IntArray, IntArray]:
        rows = len(symbols)
        half = self.symbols // 2
        # symbol 0 is no key, as in the authors' code
        keys = 1 + distinct_draws(random, half - 1, (rows, pairs))
        values = half + distinct_draws(random, self.symbols - half, (rows, pairs))
        symbols[:, 0 : 2 * pairs : 2] = keys
        symbols[:, 1 : 2 * pairs : 2] = values
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
        needles = self.data.needles
        depth = self.data.depth
        # a needle takes one of these places, and its value comes on top
        places = self.length - 1 - needles
        shape = (count, 1)
        if depth is None:
            target_place = random.integers(places, size=shape)
        else:
            target_place = np.full(shape, round_share(depth, places - 1))
        distractors = distinct_draws(random, places - 1, (count, needles - 1))
        # skipping the place that is taken
        order = np.concatenate([target_place, distractors + (distractors >= target_place)], axis=1)
        columns: IntArray = order + (order[:, :, None] > order[:, None, :]).sum(axis=2)
        return columns

    def describe(self) -> str:
        depth = "any depth"
        if self.data.depth is not None:
            depth = f"depth {self.data.depth:g}"
        needles = "a needle"
        if self.data.needles != 1:
            needles = f"one of {self.data.needles} needles"
        return f"{needles} at {depth} of {self.length} tokens, asked for at the end; 1 of {self.data.values} by chance"


@register_rule(CopyData)
@final
class CopyRule(SyntheticRule[CopyData]):
    """A random string, a mark, the string again in some order, an end mark (Jelassi et al. 2024, section 3).

    The answer and the end mark are scored: a model with a state of fixed size fails on strings beyond its capacity, and
    the end mark shows whether it counts. Symbols are those of strings, then the mark, then the end mark."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        data = self.data
        longest = self.data.max_string
        if data.min_string is None:
            shortest = longest
        else:
            shortest = data.min_string
        length = random.integers(shortest, longest + 1, size=(count, 1))
        strings = random.integers(data.symbols, size=(count, longest))
        row, column = np.nonzero(np.arange(longest) < length)
        # of all rows one behind the other, since rows differ in length
        answers = self._answers(strings, length)[row, column]
        start = length[row, 0]
        symbols = np.full((count, self.length), PADDING_SYMBOL)
        targets = np.full_like(symbols, NOT_SCORED)
        symbols[row, column] = strings[row, column]
        symbols[row, start + 1 + column] = answers
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
        shortest = self.data.min_string
        longest = self.data.max_string
        if shortest in (None, longest):
            lengths = str(longest)
        else:
            lengths = f"{shortest} to {longest}"
        order = {"same": "copied", "reversed": "reversed", "sorted": "sorted"}[self.data.order]
        return f"strings of {lengths} out of {self.data.symbols} symbols, {order}; all answers are predictable"
