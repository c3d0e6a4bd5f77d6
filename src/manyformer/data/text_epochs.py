"""Epochs of running text: rows in shuffled order, as batches for a language model or for a masked one."""

from abc import ABC, abstractmethod
from typing import final

import numpy as np
import torch

from manyformer.batches import CausalLMBatch, MaskedLMBatch
from manyformer.data.epochs import FIXED, Epoch, EpochPlan, generator
from manyformer.data.masking import mask_tokens
from manyformer.data.neighbour_tables import NeighbourTable
from manyformer.data.ragged import IntArray
from manyformer.data.row_layouts import RowArrangement, RowLayout, TextRows

# Told apart from the seeds of the order.
_MASKING = 80_10_10


class BatchMaker(ABC):
    """What rows become: the task's kind of batch."""

    name: str

    @abstractmethod
    def batch(self, rows: TextRows, seeds: tuple[int, ...]) -> CausalLMBatch | MaskedLMBatch:
        """The batch; whatever is random in it depends on `seeds` alone."""


@final
class NextTokenBatches(BatchMaker):
    """For a language model."""

    name = "next"

    def batch(self, rows: TextRows, seeds: tuple[int, ...]) -> CausalLMBatch:
        return CausalLMBatch(torch.from_numpy(rows.tokens), torch.from_numpy(rows.targets), _segments(rows))


@final
class MaskedBatches(BatchMaker):
    """For a masked language model: other tokens are hidden in every epoch."""

    def __init__(self, rate: float, vocab: int) -> None:
        self._rate, self._vocab = rate, vocab
        self.name = f"masked-{rate}"

    def batch(self, rows: TextRows, seeds: tuple[int, ...]) -> MaskedLMBatch:
        tokens, targets = mask_tokens(rows, self._rate, self._vocab, generator(*seeds, _MASKING))
        return MaskedLMBatch(torch.from_numpy(tokens), torch.from_numpy(targets), _segments(rows))


def _segments(rows: TextRows) -> torch.Tensor | None:
    return None if rows.segments is None else torch.from_numpy(rows.segments)


@final
class TextPlan(EpochPlan):
    """Batches of `rows` rows each; the last of an epoch holds what is left."""

    def __init__(
        self, layout: RowLayout, rows: int, finish: BatchMaker, fingerprint: str, lookups: NeighbourTable | None = None
    ) -> None:
        self._layout, self._rows, self._finish, self._lookups = layout, rows, finish, lookups
        self.fingerprint = f"{fingerprint}-{finish.name}-{rows}" + (f"-{lookups.origin}" if lookups else "")

    def epoch(self, seed: int, number: int) -> "TextEpoch":
        random = generator(seed, number)
        arrangement = self._layout.arrange(random, number)
        order = _order(arrangement, random)
        return TextEpoch(arrangement, order, self._rows, self._finish, (seed, number), self._lookups)

    def fixed(self) -> "TextEpoch":
        """The epoch of held-out text, always the same: mixed, so that its first batches are like all of them."""
        arrangement = self._layout.arrange(None)
        order = _order(arrangement, generator(FIXED))
        return TextEpoch(arrangement, order, self._rows, self._finish, (FIXED,), self._lookups)


def _order(arrangement: RowArrangement, random: np.random.Generator) -> IntArray:
    return np.arange(arrangement.count) if arrangement.goes_on else random.permutation(arrangement.count)


class TextEpoch(Epoch):
    """Rows in a given order, so many to a batch."""

    def __init__(
        self,
        arrangement: RowArrangement,
        order: IntArray,
        rows: int,
        finish: BatchMaker,
        seeds: tuple[int, ...],
        lookups: NeighbourTable | None,
    ) -> None:
        self._arrangement, self._order, self._rows, self._finish = arrangement, order, rows, finish
        self._lookups = lookups
        self.goes_on = arrangement.goes_on
        self._seeds = seeds

    def __len__(self) -> int:
        return -(-len(self._order) // self._rows)

    def batch(self, number: int) -> CausalLMBatch | MaskedLMBatch:
        numbers = self._order[number * self._rows : (number + 1) * self._rows]
        batch = self._finish.batch(self._arrangement.rows(numbers), (*self._seeds, number))
        if self._lookups is None or not isinstance(batch, CausalLMBatch):
            return batch
        return batch._replace(neighbours=torch.from_numpy(self._lookups.at(self._arrangement.places(numbers))))
