"""Which text is for training and which is held out: whole documents where there are many, the end of each where few."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.data.epochs import FIXED, generator
from manyformer.data.text_sources import TextPart, TextSource

# With fewer documents a whole one is too coarse a share.
FEW = 10


class DocumentPiece(NamedTuple):
    """A part of a document and the split ("train", "valid", "test") that it belongs to."""

    split: str
    part: TextPart


class TextSurvey(NamedTuple):
    """What a first reading tells: the characters of each document, and a hash of each source's text."""

    lengths: NDArray[np.int64]
    hashes: dict[str, str]


def survey(sources: Iterable[TextSource]) -> TextSurvey:
    """Reads everything once, which also finds wrong encodings and missing columns before anything is made."""
    lengths = array("q")
    hashes = {}
    for source in sources:
        text = hashlib.sha256()
        for part in source.parts():
            if part.begins:
                lengths.append(0)
            lengths[-1] += len(part.text)
            text.update(part.text.encode())
        hashes[source.name] = text.hexdigest()
    return TextSurvey(np.array(lengths, dtype=np.int64), hashes)


class HoldoutSplitter:
    """Divides documents of known lengths: `shares` names the held-out splits and their fraction of the characters."""

    def __init__(self, lengths: NDArray[np.int64], shares: dict[str, float]) -> None:
        assert sum(shares.values()) < 1
        self._lengths, self._shares = lengths, shares
        self.names = ["train", *shares]
        self._split = self._choose()
        enough = len(set(self._split.tolist())) == len(self.names)
        self.by_document = not shares or (enough and len(lengths) >= FEW)

    def _choose(self) -> NDArray[np.int8]:
        chosen = np.zeros(len(self._lengths), np.int8)
        # The same documents for every seed, so that runs can be compared.
        order = generator(FIXED).permutation(len(self._lengths))
        total = int(self._lengths.sum())
        for number, share in enumerate(self._shares.values(), start=1):
            free = order[chosen[order] == 0]
            # A document larger than the whole share stays in training.
            free = free[self._lengths[free] <= share * total]
            before = np.cumsum(self._lengths[free]) - self._lengths[free]
            chosen[free[before < share * total]] = number
        return chosen

    def divide(self, parts: Iterable[TextPart]) -> Iterator[DocumentPiece]:
        """Each part with its split, cut where the boundary lies inside it."""
        number = -1
        where = 0
        for part in parts:
            if part.begins:
                number, where = number + 1, 0
            if self.by_document:
                yield DocumentPiece(self.names[self._split[number]], part)
            else:
                yield from self._cut(part, where, int(self._lengths[number]))
            where += len(part.text)

    def _cut(self, part: TextPart, where: int, length: int) -> Iterator[DocumentPiece]:
        # Neither side of a cut is an end of the document, but every split begins somewhere: its first text does so.
        kept = 1 - sum(self._shares.values())
        begin = 0
        for name, share in zip(self.names, [kept, *self._shares.values()], strict=True):
            end = length if name == self.names[-1] else begin + int(share * length)
            low, high = max(begin, where), min(end, where + len(part.text))
            if low < high:
                yield DocumentPiece(
                    name, TextPart(part.text[low - where : high - where], begins=low == begin, ends=False)
                )
            begin = end
