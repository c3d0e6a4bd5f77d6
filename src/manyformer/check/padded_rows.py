"""Batches of documents of different lengths: padded, or packed several to a row."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyformer.check.subject import PaddingSide, SubjectOutput
from manyformer.check.trial import ContractTrial
from manyformer.core import PADDING_SEGMENT
from manyformer.tasks import Inputs


class DocumentSlot(NamedTuple):
    """The position of a document in a batch: its row and its columns `start` to `stop`."""

    row: int
    start: int
    stop: int

    def logits_of(self, result: SubjectOutput, *, per_token: bool) -> Tensor:
        """The logits of the document: of its tokens, or of its row if a row has one label."""
        logits = result.logits[self.row]
        if per_token:
            return logits[self.start : self.stop]
        return logits


class RowItem(NamedTuple):
    """A document of a row, with `padding_before` columns of padding in front of it."""

    document: int
    padding_before: int = 0


def pad_documents(
    trial: ContractTrial, documents: Sequence[Inputs], side: PaddingSide
) -> tuple[Inputs, list[DocumentSlot]]:
    """Pad the documents, one per row, and their sources on one side; returns the inputs and the slot of each."""
    tokens, segments, slots = pad_tokens(trial, [document.tokens for document in documents], side)
    source, source_segments, _ = pad_tokens(trial, _sources(documents), side)
    assert tokens is not None
    return Inputs(tokens, segments, source, source_segments), slots


def pack_documents(
    trial: ContractTrial, documents: Sequence[Inputs], rows: Sequence[Sequence[RowItem]]
) -> tuple[Inputs, list[DocumentSlot]]:
    """Pack the documents and their sources several to a row; returns the inputs and the slot of each."""
    # segment ids need not start at 0 nor be consecutive
    tokens, segments, slots = place_documents(trial, [document.tokens for document in documents], rows, first_segment=3)
    source, source_segments, _ = place_documents(trial, _sources(documents), rows, first_segment=3)
    assert tokens is not None
    return Inputs(tokens, segments, source, source_segments), slots


def pad_tokens(
    trial: ContractTrial, parts: Sequence[Tensor], side: PaddingSide
) -> tuple[Tensor | None, Tensor | None, list[DocumentSlot]]:
    """Pad the parts, one per row, on one side; returns tokens, segments and slots."""
    width = max((part.shape[1] for part in parts), default=0)
    paddings = [width - part.shape[1] if side == "left" else 0 for part in parts]
    return place_documents(trial, parts, [[RowItem(index, padding)] for index, padding in enumerate(paddings)])


def place_documents(
    trial: ContractTrial, parts: Sequence[Tensor], rows: Sequence[Sequence[RowItem]], *, first_segment: int = 0
) -> tuple[Tensor | None, Tensor | None, list[DocumentSlot]]:
    """Tokens, segments and the slots of the parts, placed in rows; (None, None, []) without parts.

    Padding is random tokens, so that a model that attends to it fails. Segments are `first_segment`, + 2, and so on.
    """
    if not parts:
        return None, None, []
    width = max(sum(parts[item.document].shape[1] + item.padding_before for item in row) for row in rows)
    tokens = trial.tokens(len(rows), trial.round_length(width))
    segments = torch.full_like(tokens, PADDING_SEGMENT)
    slots: dict[int, DocumentSlot] = {}
    for row, items in enumerate(rows):
        stop = 0
        for position, (document, padding) in enumerate(items):
            start = stop + padding
            stop = start + parts[document].shape[1]
            tokens[row, start:stop] = parts[document][0]
            segments[row, start:stop] = first_segment + 2 * position
            slots[document] = DocumentSlot(row, start, stop)
    return tokens, segments, [slots[document] for document in range(len(parts))]


def _sources(documents: Sequence[Inputs]) -> list[Tensor]:
    return [document.source for document in documents if document.source is not None]
