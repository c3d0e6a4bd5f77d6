"""The six tasks of MAD, "mechanistic architecture design" (Poli et al. 2024, section 3)."""

from typing import TypeVar, final

import numpy as np

from manyformer.config.data_sections import (
    InContextRecallData,
    MADCompressionData,
    MADCopyData,
    MADFuzzyRecallData,
    MADMemorizationData,
    MADNoisyRecallData,
    MADRecallData,
)
from manyformer.data.generated.synthetic.synthetic_rule import NOT_SCORED, SyntheticRows, SyntheticRule, register_rule

RecallSection = TypeVar("RecallSection", bound=InContextRecallData)


class InContextRecallRule(SyntheticRule[RecallSection]):
    """Pairs of a key and its value in this row; the value is predicted at each key that came before.

    The last key of a row is one of those before it. As in the authors' code with several queries in a row, but that
    training scores those queries too, and not every next token."""

    noise_share = 0.0

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        keys = self.data.keys
        pairs = self.length // 2
        values = random.integers(keys, self.symbols - self.data.noise_symbols, size=(count, keys))
        key = random.integers(keys, size=(count, pairs))
        noise = random.random((count, pairs)) < self.noise_share
        # one pair at least before the last is no noise, so that its key can be asked for
        noise[np.arange(count), random.integers(pairs - 1, size=count)] = False
        noise[:, -1] = False
        presented = np.zeros((count, keys), bool)
        came_before = np.empty((count, pairs), bool)
        # column by column, since whether a key came before depends on all pairs before it
        for column in range(pairs):
            # the last key is drawn among those that came before
            if column == pairs - 1:
                key[:, -1] = np.where(presented, random.random((count, keys)), -1).argmax(axis=1)
            came_before[:, column] = np.take_along_axis(presented, key[:, [column]], axis=1)[:, 0]
            is_presented = came_before[:, [column]] | ~noise[:, [column]]
            np.put_along_axis(presented, key[:, [column]], is_presented, axis=1)
        value = np.take_along_axis(values, key, axis=1)
        first_noise = self.symbols - self.data.noise_symbols
        symbols = np.stack([key, value], axis=2)
        if self.data.noise_symbols:
            symbols[noise] = random.integers(first_noise, self.symbols, size=(count, pairs, 2))[noise]
        targets = np.stack([np.where(came_before & ~noise, value, NOT_SCORED), np.full_like(key, NOT_SCORED)], axis=2)
        return SyntheticRows(symbols.reshape(count, -1), targets.reshape(count, -1))

    def describe(self) -> str:
        noise = ""
        if self.noise_share:
            noise = f", {self.noise_share:.0%} of the pairs noise"
        return (
            f"{self.data.keys} keys with values that a row decides{noise}; values of keys seen before are predictable"
        )


@register_rule(MADRecallData)
@final
class MADRecallRule(InContextRecallRule[MADRecallData]):
    """In-context recall without noise."""


@register_rule(MADNoisyRecallData)
@final
class MADNoisyRecallRule(InContextRecallRule[MADNoisyRecallData]):
    """In-context recall with noise."""

    def __init__(self, data: MADNoisyRecallData) -> None:
        super().__init__(data)
        self.noise_share = data.noise_share


@register_rule(MADFuzzyRecallData)
@final
class MADFuzzyRecallRule(SyntheticRule[MADFuzzyRecallData]):
    """Keys and values of several tokens, none of which occurs twice in it; a value is predicted token by token.

    As in the authors' code with several queries: pairs follow each other until no more fit, the pair that is asked for
    at the end is among them, and padding comes first."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        symbols = np.full((count, self.length), self.symbols - 1)
        targets = np.full_like(symbols, NOT_SCORED)
        for row in range(count):
            tokens, answers = self._row(random)
            # each answer is predicted one token earlier
            symbols[row, -len(tokens) :] = tokens
            targets[row, -len(tokens) : -1] = answers[1:]
        return SyntheticRows(symbols, targets)

    def _row(self, random: np.random.Generator) -> tuple[list[int], list[int]]:
        """The tokens of a row, and each again if it is to be predicted, else `NOT_SCORED`."""
        data = self.data
        values: dict[tuple[int, ...], tuple[int, ...]] = {}
        probe = self._key(random)
        longest = data.key_length + data.value_length
        # the loop leaves room for the pair that it ends with, for the probe, and for the probe again
        limit = self.length - 3 * longest
        start = random.integers(limit)
        tokens = list[int]()
        answers = list[int]()
        presented = set[tuple[int, ...]]()
        while len(tokens) < limit:
            is_probe_due = len(tokens) >= start and probe not in presented
            self._add_pair(random, probe if is_probe_due else self._key(random), values, presented, tokens, answers)
        if probe not in presented:
            self._add_pair(random, probe, values, presented, tokens, answers)
        self._add_pair(random, probe, values, presented, tokens, answers)
        return tokens, answers

    def _add_pair(
        self,
        random: np.random.Generator,
        key: tuple[int, ...],
        values: dict[tuple[int, ...], tuple[int, ...]],
        presented: set[tuple[int, ...]],
        tokens: list[int],
        answers: list[int],
    ) -> None:
        value = values.setdefault(key, self._value(random))
        tokens += [*key, *value]
        answers += [NOT_SCORED] * len(key)
        answers += value if key in presented else [NOT_SCORED] * len(value)
        presented.add(key)

    def _key(self, random: np.random.Generator) -> tuple[int, ...]:
        half = (self.symbols - 1) // 2
        size = random.integers(self.data.min_key, self.data.key_length + 1)
        return tuple(random.permutation(half)[:size].tolist())

    def _value(self, random: np.random.Generator) -> tuple[int, ...]:
        half = (self.symbols - 1) // 2
        size = random.integers(1, self.data.value_length + 1)
        return tuple((half + random.permutation(self.symbols - 1 - half)[:size]).tolist())

    def describe(self) -> str:
        keys = f"keys of {self.data.min_key} to {self.data.key_length} tokens"
        return f"{keys}, values of 1 to {self.data.value_length}; values of keys seen before are nearly predictable"


@register_rule(MADCopyData)
@final
class MADCopyRule(SyntheticRule[MADCopyData]):
    """Symbols among blanks, a mark, and as many blanks, at which the symbols are predicted in their order.

    Each blank stands before a symbol that is drawn uniformly, as in the authors' code. The last two symbols are the
    blank and the mark."""

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        copied = self.data.copied
        blank = self.symbols - 2
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
        size = self.data.compressed
        mark = self.data.symbols - 1
        content = random.integers(mark, size=(count, size))
        order = random.permuted(np.tile(np.arange(size), (count, 1)), axis=1)
        symbols = np.full((count, self.length), mark)
        symbols[:, :size] = content
        symbols[:, -size:] = self.data.symbols + order
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
