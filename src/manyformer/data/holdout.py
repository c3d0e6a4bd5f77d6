"""Division of text into training and held-out splits: by documents, or within each document if there are few."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.data.epochs import FIXED_SEED, random_generator
from manyformer.data.text_sources import TextPart, TextSource
from manyformer.exact_shares import ceil_share, exact_share, floor_share

# With fewer documents, one document is too large a share to hold out.
MIN_DOCUMENTS = 10


class DocumentPiece(NamedTuple):
    """A part of a document with its split ("train", "valid", "test")."""

    split: str
    part: TextPart


class TextSurvey(NamedTuple):
    """Results of a first pass over the text: the characters of each document, and a hash of each source's text."""

    lengths: NDArray[np.int64]
    hashes: dict[str, str]


def survey_sources(sources: Iterable[TextSource]) -> TextSurvey:
    """Survey all sources in one pass, which also raises for wrong encodings and missing columns before preparation."""
    lengths = array("q")
    hashes = {}
    for source in sources:
        hasher = hashlib.sha256()
        for part in source.parts():
            if part.starts_document:
                lengths.append(0)
            lengths[-1] += len(part.text)
            hasher.update(part.text.encode())
        hashes[source.name] = hasher.hexdigest()
    return TextSurvey(np.array(lengths, dtype=np.int64), hashes)


class HoldoutSplitter:
    """Assigns documents of the given lengths to splits; `shares` maps held-out splits to fractions of characters."""

    def __init__(self, lengths: NDArray[np.int64], shares: dict[str, float]) -> None:
        assert sum(shares.values()) < 1
        self._lengths = lengths
        self._shares = shares
        self.names = ["train", *shares]
        self._split_of_document = self._assign_splits()
        none_empty = len(set(self._split_of_document.tolist())) == len(self.names)
        self.by_document = not shares or (none_empty and len(lengths) >= MIN_DOCUMENTS)

    def _assign_splits(self) -> NDArray[np.int8]:
        splits = np.zeros(len(self._lengths), np.int8)
        # a fixed seed, so that all runs hold out the same documents and can be compared
        order = random_generator(FIXED_SEED).permutation(len(self._lengths))
        total = int(self._lengths.sum())
        for number, share in enumerate(self._shares.values(), start=1):
            candidates = order[splits[order] == 0]
            # a document larger than the share remains in training
            # lengths are integers: what is below the share is below its next integer
            limit = floor_share(share, total)
            candidates = candidates[self._lengths[candidates] <= limit]
            preceding = np.cumsum(self._lengths[candidates]) - self._lengths[candidates]
            splits[candidates[preceding < ceil_share(share, total)]] = number
        return splits

    def divide(self, parts: Iterable[TextPart]) -> Iterator[DocumentPiece]:
        """Stream each part with its split; a part that contains a split boundary is divided there."""
        document = -1
        offset = 0
        for part in parts:
            if part.starts_document:
                document = document + 1
                offset = 0
            if self.by_document:
                yield DocumentPiece(self.names[self._split_of_document[document]], part)
            else:
                yield from self._divide_part(part, offset, int(self._lengths[document]))
            offset += len(part.text)

    def _divide_part(self, part: TextPart, offset: int, length: int) -> Iterator[DocumentPiece]:
        # No side of a boundary ends the document, but the first part of a split in a document starts one.
        train_share = 1 - sum(map(exact_share, self._shares.values()))
        split_start = 0
        for name, share in zip(self.names, [train_share, *self._shares.values()], strict=True):
            if name == self.names[-1]:
                split_stop = length
            else:
                split_stop = split_start + floor_share(share, length)
            start = max(split_start, offset)
            stop = min(split_stop, offset + len(part.text))
            if start < stop:
                yield DocumentPiece(
                    name,
                    TextPart(
                        part.text[start - offset : stop - offset],
                        starts_document=start == split_start,
                        ends_document=False,
                    ),
                )
            split_start = split_stop
