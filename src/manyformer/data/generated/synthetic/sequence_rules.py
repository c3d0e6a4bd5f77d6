"""Rules whose sequences are chains, cycles, copies, pointers, sums, and products of the elements of a group."""

from itertools import permutations
from typing import final

import numpy as np

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import IntArray
from manyformer.config.data_sections import (
    AdditionData,
    DuplicateData,
    HopsData,
    MarkedData,
    MarkovData,
    PeriodicData,
    StateTrackingData,
)
from manyformer.data.generated.synthetic.synthetic_rule import NOT_SCORED, SyntheticRows, SyntheticRule, register_rule


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
        # one more symbol than the row has: the target of the last one
        sequences = np.empty((count, self.length + 1), np.int64)
        sequences[:, :2] = random.integers(self.symbols, size=(count, 2))[:, : self.length + 1]
        chosen = random.choice(len(self.PROBABILITIES), size=(count, self.length + 1), p=self.PROBABILITIES)
        for column in range(2, self.length + 1):
            context = sequences[:, column - 2] * self.symbols + sequences[:, column - 1]
            sequences[:, column] = self._successors[context, chosen[:, column]]
        return SyntheticRows(sequences[:, :-1].copy(), sequences[:, 1:].copy())

    def describe(self) -> str:
        return f"a Markov chain of order 2 over {self.symbols} symbols; best loss {self.entropy:.3f} nats per symbol"


@register_rule(PeriodicData)
@final
class PeriodicRule(SyntheticRule[PeriodicData]):
    """A repeated cycle of `period` random symbols: each equals the symbol `period` positions back.

    A model predicts it only if its attention reaches that far.
    """

    def __init__(self, data: PeriodicData) -> None:
        super().__init__(data)
        self._period = data.period

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        cycle = random.integers(self.symbols, size=(count, self._period))
        sequences = cycle[:, np.arange(self.length + 1) % self._period]
        return SyntheticRows(sequences[:, :-1].copy(), sequences[:, 1:].copy())

    def describe(self) -> str:
        return f"a repeated cycle of {self._period} out of {self.symbols} symbols; every repetition is predictable"


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
        rows = np.arange(count)
        column = random.integers(self.REGION_LENGTH, size=count)
        answers = symbols[rows, column]
        # the same value with a mark
        symbols[rows, column] += self._values
        symbols[:, -self.REGION_LENGTH :] = 2 * self._values
        targets = np.full_like(symbols, -1)
        targets[:, -self.REGION_LENGTH :] = answers[:, None]
        return SyntheticRows(symbols, targets)

    def describe(self) -> str:
        return f"one of {self._values} values marked at the start and queried {self.length} positions later"


@register_rule(DuplicateData)
@final
class DuplicateRule(SyntheticRule[DuplicateData]):
    """A separator and a random word, both repeated: 0w0w (Kitaev et al. 2020, section 4, "duplication task").

    It tests attention that must find one token among many, half a row away: each symbol of the second copy follows
    from the first. Only the second copy is scored. Symbol 0 is the separator.
    """

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        half = self.length // 2
        word = random.integers(1, self.symbols, size=(count, half))
        # the separator, which is no symbol of words
        word[:, 0] = 0
        symbols = np.concatenate([word, word], axis=1)
        targets = np.full_like(symbols, -1)
        targets[:, half:-1] = word[:, 1:]
        return SyntheticRows(symbols, targets)

    def describe(self) -> str:
        length = self.length // 2 - 1
        return f"a word of {length} out of {self.symbols - 1} symbols, repeated once; the copy is predictable"


@register_rule(HopsData)
@final
class HopsRule(SyntheticRule[HopsData]):
    """Pointer chasing: nodes point at nodes, and queries ask for the node at the end of a number of hops.

    Each hop takes one more lookup, so the difficulty is controlled; it tests models with adaptive computation (Graves
    2016). A row starts with all nodes in random order, each with the node that it points at as one symbol of
    `nodes`^2. A query is one symbol too: a node and a number of hops. Pointers are a permutation, so that all answers
    are equally likely.
    """

    def __init__(self, data: HopsData) -> None:
        super().__init__(data)
        self._nodes = data.symbols
        self._max_hops = data.hops
        self._num_hops = data.num_hops

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        nodes = self._nodes
        shape = (count, self.length - self._nodes)
        pointers, order = (random.permuted(np.tile(np.arange(nodes), (count, 1)), axis=1) for _ in range(2))
        table = order * nodes + np.take_along_axis(pointers, order, axis=1)
        node = random.integers(nodes, size=shape)
        if self._num_hops is None:
            hops = random.integers(1, self._max_hops + 1, size=shape)
        else:
            hops = np.full(shape, self._num_hops)
        questions = nodes**2 + (hops - 1) * nodes + node
        answers = node
        # all queries hop together; those that have arrived stay
        for hop in range(self._max_hops):
            answers = np.where(hop < hops, np.take_along_axis(pointers, answers, axis=1), answers)
        return SyntheticRows(
            np.concatenate([table, questions], axis=1), np.concatenate([np.full_like(table, -1), answers], axis=1)
        )

    def describe(self) -> str:
        if self._num_hops is None:
            hops = f"1 to {self._max_hops}"
        else:
            hops = str(self._num_hops)
        return f"{self._nodes} nodes with pointers, and queries for the node after {hops} hops; all are predictable"


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
        shape = (count, self.length)
        column = np.arange(self.length)
        different = random.random(shape) < random.choice(self.DIFFERENCE_RATES, size=(count, 1))
        start = random.integers(self.length - self._digits + 1, size=(count, 1))
        inside = (column >= start) & (column < start + self._digits)
        bits_a = random.integers(2, size=shape) * inside
        bits_b = (bits_a ^ different) * inside
        total = np.empty_like(bits_a)
        carry = np.zeros(count, np.int64)
        # bit by bit: the carry of each column depends on the one before
        for index in column:
            bit_sum = bits_a[:, index] + bits_b[:, index] + carry
            total[:, index] = bit_sum % 2
            carry = bit_sum // 2
        return SyntheticRows(2 * bits_a + bits_b, np.where(inside, total, -1))

    def describe(self) -> str:
        return f"two numbers of {self._digits} bits and the bits of their sum; all are predictable"


@register_rule(StateTrackingData)
@final
class StateTrackingRule(SyntheticRule[StateTrackingData]):
    """Uniformly drawn elements of a group; targets are the products of all so far (Merrill et al. 2024, section 5).

    Linear recurrences whose eigenvalues are positive cannot compute parity at every length (Grazzi et al. 2025, theorem
    1). The word problems of A5 and S5 are complete for NC1, unlike those of S3 and of counting."""

    def __init__(self, data: StateTrackingData) -> None:
        super().__init__(data)
        items = {"S3": 3, "A5": 5, "S5": 5}.get(data.group)
        if items is None:
            self.table = cyclic_table(self.symbols)
        else:
            self.table = permutation_table(items, even_only=data.group == "A5")

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        elements = random.integers(self.symbols, size=(count, self.length))
        products = elements.copy()
        # one column after another, since the group need not be commutative
        for column in range(1, self.length):
            products[:, column] = self.table[products[:, column - 1], elements[:, column]]
        if self.data.scored == "last":
            products[:, :-1] = NOT_SCORED
        return SyntheticRows(elements, products)

    def describe(self) -> str:
        if self.data.group == "modular":
            group = f"the sum modulo {self.symbols}"
        else:
            group = self.data.group
        return f"{group}: the product of all of {self.symbols} elements so far; all are predictable"


def cyclic_table(size: int) -> IntArray:
    """The sums modulo `size` of all pairs of numbers below it."""
    return np.add.outer(np.arange(size), np.arange(size)) % size


def permutation_table(items: int, *, even_only: bool = False) -> IntArray:
    """The products of all pairs of permutations, in lexicographic order, of which 0 is the identity.

    The product of p and q takes item i to p[q[i]]."""
    elements = np.array(list(permutations(range(items))))
    if even_only:
        inversions = np.triu(elements[:, :, None] > elements[:, None, :], 1).sum(axis=(1, 2))
        elements = elements[inversions % 2 == 0]
    weights = items ** np.arange(items - 1, -1, -1)
    # composed[p, q, i] = elements[p, elements[q, i]]; the codes ascend, as the order is lexicographic
    composed = elements[:, elements]
    return np.searchsorted(elements @ weights, composed @ weights)
