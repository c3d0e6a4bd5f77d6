"""Pointers and questions about chains of them."""

from typing import final

import numpy as np

from manyformer.config.data_sections import HopsData
from manyformer.data.synthetic.synthetic_rule import SyntheticRows, SyntheticRule, register_rule


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
        self._nodes, self._max_hops, self._num_hops = data.symbols, data.hops, data.num_hops

    def rows(self, random: np.random.Generator, count: int) -> SyntheticRows:
        nodes, shape = self._nodes, (count, self.length - self._nodes)
        pointers, order = (random.permuted(np.tile(np.arange(nodes), (count, 1)), axis=1) for _ in range(2))
        table = order * nodes + np.take_along_axis(pointers, order, axis=1)
        node = random.integers(nodes, size=shape)
        hops = (
            random.integers(1, self._max_hops + 1, size=shape)
            if self._num_hops is None
            else np.full(shape, self._num_hops)
        )
        questions, answers = nodes**2 + (hops - 1) * nodes + node, node
        for hop in range(self._max_hops):
            answers = np.where(hop < hops, np.take_along_axis(pointers, answers, axis=1), answers)
        return SyntheticRows(
            np.concatenate([table, questions], axis=1), np.concatenate([np.full_like(table, -1), answers], axis=1)
        )

    def describe(self) -> str:
        hops = f"1 to {self._max_hops}" if self._num_hops is None else str(self._num_hops)
        return f"{self._nodes} nodes with pointers, and queries for the node after {hops} hops; all are predictable"
