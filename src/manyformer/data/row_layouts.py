"""Running text as rows of equal length: windows on the stream of all documents, or documents packed side by side."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.batches import IGNORE_INDEX
from manyformer.data.packing import PackedRows, pack
from manyformer.data.ragged import IntArray, ragged_arange
from manyformer.data.token_shards import TokenArray, TokenShard
from manyformer.data.tokenizer import Tokenizer


class TextRows(NamedTuple):
    """Rows of text. `targets` are the next tokens; IGNORE where another row has that target, or nothing follows.

    `is_first_copy` is False where another row has the same token too.
    """

    tokens: IntArray
    targets: IntArray
    segments: IntArray | None
    is_first_copy: NDArray[np.bool_]


class RowArrangement(ABC):
    """All rows of an epoch, numbered; together they hold every target exactly once.

    `goes_on` says that they are to be taken in order, so many at a time that each goes on with the one above it.
    """

    count: int
    goes_on: bool = False

    @abstractmethod
    def rows(self, numbers: IntArray) -> TextRows:
        """These rows, as arrays."""

    @abstractmethod
    def places(self, numbers: IntArray) -> IntArray:
        """Where in the shard each token of these rows stands, -1 for padding."""


class RowLayout(ABC):
    """A way to put text into rows."""

    @abstractmethod
    def arrange(self, random: np.random.Generator | None, epoch: int = 0) -> RowArrangement:
        """The rows of epoch number `epoch`; `random` None for the fixed order of held-out text."""


class WindowLayout(RowLayout):
    """`length` tokens after `length` tokens of all documents end to end; begins at another place every epoch.

    In training the stream is a ring, so that every token is a target whatever the beginning. The last window reaches
    back over the one before to be as long as the others, and ignores what that one has had.
    """

    def __init__(self, shard: TokenShard, length: int, *, shifted: bool) -> None:
        self._tokens, self._shifted = shard.tokens, shifted
        self.length = length

    def arrange(self, random: np.random.Generator | None, epoch: int = 0) -> "WindowArrangement":
        count = len(self._tokens)
        if random is not None:
            return WindowArrangement(self._tokens, int(random.integers(count)), count, self.length)
        # In order and without the ring, the first token has nothing before it to be predicted from.
        return WindowArrangement(self._tokens, 0, count - self._shifted, self.length)


class WindowArrangement(RowArrangement):
    """Windows over `targets` targets, the first of which follows the token at `begin`."""

    def __init__(self, tokens: TokenArray, begin: int, targets: int, length: int) -> None:
        self._tokens, self._begin, self._targets = tokens, begin, targets
        self.length = min(length, targets)
        self.count = -(-targets // self.length)

    def places(self, numbers: IntArray) -> IntArray:
        return self._index(numbers)[:, :-1] % len(self._tokens)

    def rows(self, numbers: IntArray) -> TextRows:
        taken = np.asarray(self._tokens[self._index(numbers) % len(self._tokens)], dtype=np.int64)
        tokens, targets = taken[:, :-1].copy(), taken[:, 1:].copy()
        own = np.arange(self.length) >= (numbers * self.length - self._starts(numbers))[:, None]
        # That a text begins is given, not predicted.
        targets[~own | (targets == Tokenizer.bos)] = IGNORE_INDEX
        return TextRows(tokens, targets, None, own)

    def _starts(self, numbers: IntArray) -> IntArray:
        return np.minimum(numbers * self.length, self._targets - self.length)

    def _index(self, numbers: IntArray) -> IntArray:
        """Where the tokens and the one after them stand, counted on through the end of the ring."""
        return (self._begin + self._starts(numbers))[:, None] + np.arange(self.length + 1)


class DocumentLayout(RowLayout, RowArrangement):
    """Documents packed into rows of `length`, each its own segment; longer ones are cut into pieces.

    `shifted` (for language models): a row holds a token only where its successor is a target, so that a document of n
    tokens takes n - 1 places, and the token at a cut stands in both pieces, in one as target, in one as input.
    """

    def __init__(self, shard: TokenShard, length: int, *, shifted: bool) -> None:
        self._tokens, self.length, self._shifted = shard.tokens, length, shifted
        self._packed: PackedRows = pack(np.asarray(shard.offsets), length, spare=int(shifted))
        self.count = len(self._packed.first) - 1

    def arrange(self, random: np.random.Generator | None, epoch: int = 0) -> "DocumentLayout":
        return self

    def places(self, numbers: IntArray) -> IntArray:
        return self._put(numbers)[0]

    def rows(self, numbers: IntArray) -> TextRows:
        places, segments = self._put(numbers)
        own = places >= 0
        tokens = np.where(own, self._tokens[places].astype(np.int64), Tokenizer.pad)
        targets = np.full_like(tokens, IGNORE_INDEX)
        if self._shifted:
            targets = np.where(own, self._tokens[(places + 1) % len(self._tokens)].astype(np.int64), IGNORE_INDEX)
        return TextRows(tokens, targets, segments if segments.any() else None, own)

    def _put(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Where each token of these rows stands, and the number of its piece in its row: -1 for padding."""
        packed, shape = self._packed, (len(numbers), self.length)
        counts = packed.first[numbers + 1] - packed.first[numbers]
        # The pieces of these rows, the row of each, and where in its row each begins.
        chosen = packed.pieces[np.repeat(packed.first[numbers], counts) + ragged_arange(counts)]
        starts, sizes, row = packed.starts[chosen], packed.sizes[chosen], np.repeat(np.arange(len(numbers)), counts)
        before = np.cumsum(sizes) - sizes
        column = before - np.repeat(before[np.cumsum(counts) - counts], counts)
        at = (np.repeat(row, sizes), np.repeat(column, sizes) + ragged_arange(sizes))
        places, segments = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
        places[at] = np.repeat(starts, sizes) + ragged_arange(sizes)
        segments[at] = np.repeat(ragged_arange(counts), sizes)
        return places, segments
