"""Rules that make sequences: tasks whose answer is known, as many rows of them as anybody wants.

A new one is a class here, an entry in `RULES`, and its name and settings in `manyformer.config.SyntheticData`.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import numpy as np

from manyformer.config import SyntheticData
from manyformer.data.plan import generator
from manyformer.data.ragged import Whole

# Told apart from the seeds of rows.
_RULE = 1_009


class Made(NamedTuple):
    """Rows of symbols, numbered from 0, and what follows each; a target below 0 is not scored."""

    symbols: Whole
    targets: Whole


class Rule(ABC):
    """Makes rows; everything that is random in them comes from the generator it is given."""

    def __init__(self, data: SyntheticData) -> None:
        self.length, self.symbols = data.length, data.symbols

    @abstractmethod
    def rows(self, random: np.random.Generator, count: int) -> Made:
        """`count` rows of `length` symbols each."""

    @abstractmethod
    def describe(self) -> str:
        """For people: what is there to be learned, and what is the best that can be done."""


@final
class Markov(Rule):
    """A Markov chain of order two: the last two symbols choose among four successors.

    Good for attention that must tell the last two places apart, and nothing else: the best loss is the same at every
    length. The first two symbols of a row are drawn evenly.
    """

    CHANCES = (0.7, 0.15, 0.1, 0.05)

    def __init__(self, data: SyntheticData) -> None:
        super().__init__(data)
        random = generator(data.seed, _RULE)
        pairs = data.symbols**2
        # distinct ones, so that the entropy is that of the chances
        self._next = random.permuted(np.tile(np.arange(data.symbols), (pairs, 1)), axis=1)[:, : len(self.CHANCES)]

    @property
    def entropy(self) -> float:
        """Nats a symbol for somebody who knows the rule."""
        chances = np.array(self.CHANCES)
        return float(-(chances * np.log(chances)).sum())

    def rows(self, random: np.random.Generator, count: int) -> Made:
        whole = np.empty((count, self.length + 1), np.int64)
        whole[:, :2] = random.integers(self.symbols, size=(count, 2))[:, : self.length + 1]
        chosen = random.choice(len(self.CHANCES), size=(count, self.length + 1), p=self.CHANCES)
        for column in range(2, self.length + 1):
            before = whole[:, column - 2] * self.symbols + whole[:, column - 1]
            whole[:, column] = self._next[before, chosen[:, column]]
        return Made(whole[:, :-1].copy(), whole[:, 1:].copy())

    def describe(self) -> str:
        return f"a Markov chain of order 2 over {self.symbols} symbols; {self.entropy:.3f} nats a symbol at best"


RULES: dict[str, type[Rule]] = {"markov": Markov}
