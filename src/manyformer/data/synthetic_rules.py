"""Rules that make sequences: tasks whose answer is known, as many rows of them as anybody wants.

A new one is a class here, an entry in `RULES`, and its name and settings in `manyformer.config.SyntheticData`.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import numpy as np

from manyformer.config import SyntheticData
from manyformer.data.epochs import generator
from manyformer.data.ragged import IntArray
from manyformer.errors import UserError

# Told apart from the seeds of rows.
_RULE = 1_009


class SyntheticRows(NamedTuple):
    """Rows of symbols, numbered from 0, and what follows each; a target below 0 is not scored."""

    symbols: IntArray
    targets: IntArray


class SyntheticRule(ABC):
    """Makes rows; everything that is random in them comes from the generator it is given."""

    def __init__(self, data: SyntheticData) -> None:
        self.length, self.symbols = data.length * data.parts, data.symbols

    @abstractmethod
    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        """`count` rows of `length` symbols each."""

    @abstractmethod
    def describe(self) -> str:
        """For people: what is there to be learned, and what is the best that can be done."""


@final
class MarkovRule(SyntheticRule):
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

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        whole = np.empty((count, self.length + 1), np.int64)
        whole[:, :2] = random.integers(self.symbols, size=(count, 2))[:, : self.length + 1]
        chosen = random.choice(len(self.CHANCES), size=(count, self.length + 1), p=self.CHANCES)
        for column in range(2, self.length + 1):
            before = whole[:, column - 2] * self.symbols + whole[:, column - 1]
            whole[:, column] = self._next[before, chosen[:, column]]
        return SyntheticRows(whole[:, :-1].copy(), whole[:, 1:].copy())

    def describe(self) -> str:
        return f"a Markov chain of order 2 over {self.symbols} symbols; {self.entropy:.3f} nats a symbol at best"


@final
class PeriodicRule(SyntheticRule):
    """`period` random symbols, again and again: each symbol is the one so many places back, which must be in sight."""

    def __init__(self, data: SyntheticData) -> None:
        super().__init__(data)
        self._period = data.period

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        cycle = random.integers(self.symbols, size=(count, self._period))
        whole = cycle[:, np.arange(self.length + 1) % self._period]
        return SyntheticRows(whole[:, :-1].copy(), whole[:, 1:].copy())

    def describe(self) -> str:
        return f"{self._period} random ones of {self.symbols} symbols again and again; what comes again can be known"


@final
class MarkedRule(SyntheticRule):
    """One of the first `REGION` symbols is marked, and asked for in the last `REGION` places of the sequence.

    Half of the symbols are values, as many are the same ones marked, and the last one asks.
    """

    REGION = 8

    def __init__(self, data: SyntheticData) -> None:
        super().__init__(data)
        self._values = (data.symbols - 1) // 2
        if self.length <= 2 * self.REGION:
            raise UserError(f"sequences of {self.length} tokens are too short to ask later: set data.length higher")

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        symbols = random.integers(self._values, size=(count, self.length))
        rows, place = np.arange(count), random.integers(self.REGION, size=count)
        wanted = symbols[rows, place]
        symbols[rows, place] += self._values
        symbols[:, -self.REGION :] = 2 * self._values
        targets = np.full_like(symbols, -1)
        targets[:, -self.REGION :] = wanted[:, None]
        return SyntheticRows(symbols, targets)

    def describe(self) -> str:
        return f"one of {self._values} values marked at the beginning and asked for {self.length} places later"


@final
class DuplicateRule(SyntheticRule):
    """A mark and a random word, both twice: 0w0w (Kitaev et al. 2020, section 4, "duplication task").

    Good for attention that must find one token among many, half a row away: each symbol of the second word follows
    from the first. Nothing else is scored. Symbol 0 is the mark.
    """

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        half = self.length // 2
        word = random.integers(1, self.symbols, size=(count, half))
        word[:, 0] = 0
        whole = np.concatenate([word, word], axis=1)
        targets = np.full_like(whole, -1)
        targets[:, half:-1] = word[:, 1:]
        return SyntheticRows(whole, targets)

    def describe(self) -> str:
        return f"a word of {self.length // 2 - 1} out of {self.symbols - 1} symbols, twice: the second time it is known"


@final
class HopsRule(SyntheticRule):
    """Nodes point at nodes; questions ask where so many hops lead: each hop is one more look, so difficulty is known.

    Good for models that decide how much to compute (Graves 2016). A row begins with all nodes, in any order, each with
    the one that it points at, as one symbol of `nodes`^2. A question is a symbol as well: a node and how many hops.
    Pointers are a permutation, so that no answer is likelier than another.
    """

    def __init__(self, data: SyntheticData) -> None:
        super().__init__(data)
        self._nodes, self._hops, self._asked = data.symbols, data.hops, data.asked
        self.symbols = self._nodes**2 + self._hops * self._nodes

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        nodes, shape = self._nodes, (count, self.length - self._nodes)
        points, order = (random.permuted(np.tile(np.arange(nodes), (count, 1)), axis=1) for _ in range(2))
        table = order * nodes + np.take_along_axis(points, order, axis=1)
        node = random.integers(nodes, size=shape)
        hops = random.integers(1, self._hops + 1, size=shape) if self._asked is None else np.full(shape, self._asked)
        questions, answers = nodes**2 + (hops - 1) * nodes + node, node
        for hop in range(self._hops):
            answers = np.where(hop < hops, np.take_along_axis(points, answers, axis=1), answers)
        return SyntheticRows(
            np.concatenate([table, questions], axis=1),
            np.concatenate([np.full_like(table, -1), answers], axis=1),
        )

    def describe(self) -> str:
        asked = f"1 to {self._hops}" if self._asked is None else str(self._asked)
        return f"{self._nodes} nodes that point at each other, and where {asked} hops lead: all can be known"


@final
class AdditionRule(SyntheticRule):
    """Two binary numbers, the lowest bits first, and the bits of their sum (Dehghani et al. 2019, section 3.3).

    A carry goes on as long as the two bits differ, which in some rows they nearly always do, so that it may come from
    far. Numbers begin anywhere in the row, after zeros: all places of a row are known to who has seen short numbers.
    """

    DIFFERENT = (0.5, 0.7, 0.9, 0.97)

    def __init__(self, data: SyntheticData) -> None:
        super().__init__(data)
        self._digits = data.digits

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        shape, column = (count, self.length), np.arange(self.length)
        different = random.random(shape) < random.choice(self.DIFFERENT, size=(count, 1))
        first = random.integers(self.length - self._digits + 1, size=(count, 1))
        inside = (column >= first) & (column < first + self._digits)
        one = random.integers(2, size=shape) * inside
        other = (one ^ different) * inside
        total, carry = np.empty_like(one), np.zeros(count, np.int64)
        for place in column:
            both = one[:, place] + other[:, place] + carry
            total[:, place], carry = both % 2, both // 2
        return SyntheticRows(2 * one + other, np.where(inside, total, -1))

    def describe(self) -> str:
        return f"two numbers of {self._digits} bits, and those of their sum: all can be known"


RULES: dict[str, type[SyntheticRule]] = {
    "markov": MarkovRule,
    "periodic": PeriodicRule,
    "marked": MarkedRule,
    "duplicate": DuplicateRule,
    "hops": HopsRule,
    "addition": AdditionRule,
}
