"""Selective copying, compression and memorization of MAD (Poli et al. 2024, section 3)."""

from typing import final

import numpy as np

from manyformer.config.data_sections import MADCompressionData, MADCopyData, MADMemorizationData
from manyformer.data.synthetic.synthetic_rule import NOT_SCORED, SyntheticRows, SyntheticRule, register_rule


@register_rule(MADCopyData)
@final
class MADCopyRule(SyntheticRule[MADCopyData]):
    """Symbols among blanks, a mark, and as many blanks, at which the symbols are predicted in their order.

    Each blank stands before a symbol that is drawn uniformly, as in the authors' code. The last two symbols are the
    blank and the mark."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        copied, blank = self.data.copied, self.symbols - 2
        start = self.length - copied
        content = random.integers(blank, size=(count, copied))
        preceding = random.integers(copied, size=(count, start - 1 - copied))
        columns = np.arange(copied) + (preceding[:, :, None] <= np.arange(copied)).sum(axis=1)
        symbols = np.full((count, self.length), blank)
        np.put_along_axis(symbols, columns, content, axis=1)
        symbols[:, start - 1] = blank + 1
        targets = np.full_like(symbols, NOT_SCORED)
        targets[:, start:] = content
        return SyntheticRows(symbols, targets)

    def describe(self) -> str:
        return f"{self.data.copied} symbols among blanks in {self.length} tokens, to be copied; all are predictable"


@register_rule(MADCompressionData)
@final
class MADCompressionRule(SyntheticRule[MADCompressionData]):
    """Symbols, a mark, then numbers of positions in random order, at which the symbols there are predicted.

    The authors' models encode all symbols in the last token, from which a decoder without attention reads each by its
    position. Ours are causal models that are asked for positions: a state of fixed size is tested likewise, attention
    may look up each symbol without compressing any."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        size, mark = self.data.compressed, self.data.symbols - 1
        content = random.integers(mark, size=(count, size))
        order = random.permuted(np.tile(np.arange(size), (count, 1)), axis=1)
        symbols = np.full((count, self.length), mark)
        symbols[:, :size], symbols[:, -size:] = content, self.data.symbols + order
        targets = np.full_like(symbols, NOT_SCORED)
        targets[:, -size:] = np.take_along_axis(content, order, axis=1)
        return SyntheticRows(symbols, targets)

    def describe(self) -> str:
        return f"{self.data.compressed} symbols, then questions for each by its position; all are predictable"


@register_rule(MADMemorizationData)
@final
class MADMemorizationRule(SyntheticRule[MADMemorizationData]):
    """Keys, each followed by a mark, at which its value is predicted: the same in all rows, decided by `data.seed`."""

    def __init__(self, data: MADMemorizationData) -> None:
        super().__init__(data)
        keys = (self.symbols - 1) // 2
        self.values = keys + self.rule_generator().permutation(self.symbols - 1 - keys)[:keys]

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        key = random.integers(len(self.values), size=(count, self.length // 2))
        symbols = np.stack([key, np.full_like(key, self.symbols - 1)], axis=2)
        targets = np.stack([np.full_like(key, NOT_SCORED), self.values[key]], axis=2)
        return SyntheticRows(symbols.reshape(count, -1), targets.reshape(count, -1))

    def describe(self) -> str:
        return f"{len(self.values)} keys whose values never change; all are predictable once they are learnt"
