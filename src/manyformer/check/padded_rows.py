"""Documents of different lengths as rows of one batch: padded, or packed several to a row."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyformer.check.subject import Inputs, PaddingSide, SubjectOutput
from manyformer.check.trial import ContractTrial
from manyformer.core import PADDING_SEGMENT


class DocumentSlot(NamedTuple):
    """Where a document lies in a batch."""

    row: int
    begin: int
    end: int

    def of(self, result: SubjectOutput, *, tokenwise: bool) -> Tensor:
        """The logits of the document: of its tokens, or of its row where a row has one label."""
        logits = result.logits[self.row]
        return logits[self.begin : self.end] if tokenwise else logits


class RowItem(NamedTuple):
    """A document in a row, with so many columns of padding before it."""

    document: int
    gap: int = 0


def pad(trial: ContractTrial, documents: Sequence[Inputs], side: PaddingSide) -> tuple[Inputs, list[DocumentSlot]]:
    """One document a row, sources likewise, filled up on one side; and where each lies."""
    tokens, segments, spots = pad_tokens(trial, [document.tokens for document in documents], side)
    source, source_segments, _ = pad_tokens(trial, _sources(documents), side)
    assert tokens is not None
    return Inputs(tokens, segments, source, source_segments), spots


def pack(
    trial: ContractTrial, documents: Sequence[Inputs], rows: Sequence[Sequence[RowItem]]
) -> tuple[Inputs, list[DocumentSlot]]:
    """Several documents a row, sources likewise; and where each lies."""
    # numbers need not begin at 0, nor follow one another
    tokens, segments, spots = place_documents(trial, [document.tokens for document in documents], rows, first=3)
    source, source_segments, _ = place_documents(trial, _sources(documents), rows, first=3)
    assert tokens is not None
    return Inputs(tokens, segments, source, source_segments), spots


def pad_tokens(
    trial: ContractTrial, parts: Sequence[Tensor], side: PaddingSide
) -> tuple[Tensor | None, Tensor | None, list[DocumentSlot]]:
    """Each part in its own row, with padding on one side."""
    width = max((part.shape[1] for part in parts), default=0)
    gaps = [width - part.shape[1] if side == "left" else 0 for part in parts]
    return place_documents(trial, parts, [[RowItem(number, gap)] for number, gap in enumerate(gaps)])


def place_documents(
    trial: ContractTrial, parts: Sequence[Tensor], rows: Sequence[Sequence[RowItem]], *, first: int = 0
) -> tuple[Tensor | None, Tensor | None, list[DocumentSlot]]:
    """Tokens and segments of rows of parts, and where each part lies; (None, None, []) of no parts.

    Padding is random tokens, so that whoever looks at it is found out. Segments are `first`, `first` + 2, and so on.
    """
    if not parts:
        return None, None, []
    width = max(sum(parts[item.document].shape[1] + item.gap for item in row) for row in rows)
    tokens = trial.tokens(len(rows), trial.round_length(width))
    segments = torch.full_like(tokens, PADDING_SEGMENT)
    spots: dict[int, DocumentSlot] = {}
    for row, items in enumerate(rows):
        end = 0
        for order, (number, gap) in enumerate(items):
            begin = end + gap
            end = begin + parts[number].shape[1]
            tokens[row, begin:end], segments[row, begin:end] = parts[number][0], first + 2 * order
            spots[number] = DocumentSlot(row, begin, end)
    return tokens, segments, [spots[number] for number in range(len(parts))]


def _sources(documents: Sequence[Inputs]) -> list[Tensor]:
    return [document.source for document in documents if document.source is not None]
