"""Sequences of a Markov chain."""

from typing import final

import numpy as np

from manyformer.config.data_sections import MarkovData
from manyformer.data.synthetic.synthetic_rule import SyntheticRows, SyntheticRule, register_rule


@register_rule(MarkovData)
@final
class MarkovRule(SyntheticRule[MarkovData]):
    """A Markov chain of order two: each pair of symbols has four possible successors.

    It tests attention that must distinguish the last two positions, and nothing else: the best loss is the same at
    every length. The first two symbols of a row are drawn uniformly.
    """

    PROBABILITIES = (0.7, 0.15, 0.1, 0.05)

    def __init__(self, data: MarkovData) -> None:
        super().__init__(data)
        random = self.rule_generator()
        pairs = data.symbols**2
        # distinct successors, so that the entropy is that of `PROBABILITIES`
        self._successors = random.permuted(np.tile(np.arange(data.symbols), (pairs, 1)), axis=1)[
            :, : len(self.PROBABILITIES)
        ]

    @property
    def entropy(self) -> float:
        """The entropy per symbol in nats, which is the best possible loss."""
        probabilities = np.array(self.PROBABILITIES)
        return float(-(probabilities * np.log(probabilities)).sum())

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        sequences = np.empty((count, self.length + 1), np.int64)
        sequences[:, :2] = random.integers(self.symbols, size=(count, 2))[:, : self.length + 1]
        chosen = random.choice(len(self.PROBABILITIES), size=(count, self.length + 1), p=self.PROBABILITIES)
        for column in range(2, self.length + 1):
            context = sequences[:, column - 2] * self.symbols + sequences[:, column - 1]
            sequences[:, column] = self._successors[context, chosen[:, column]]
        return SyntheticRows(sequences[:, :-1].copy(), sequences[:, 1:].copy())

    def describe(self) -> str:
        return f"a Markov chain of order 2 over {self.symbols} symbols; best loss {self.entropy:.3f} nats per symbol"
