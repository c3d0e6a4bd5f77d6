"""Tokens as a model is given them: checks of rows and ids; positions, which restart in every document."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.batches.batch import SegmentLayout, segment_layout
from manyformer.core import (
    PADDING_SEGMENT,
    AlignedLayout,
    ContiguousLayout,
    TokenPositions,
    contiguous_positions,
)
from manyformer.device_reads import is_readable
from manyformer.errors import UserError

UNSTARTED_SEGMENT = -2
"""The segment id of a row without tokens so far."""


class StreamTail(NamedTuple):
    """The position and segment of each row's last token that is not padding, from which the next call continues.

    As long as all rows are one document without padding, `contiguous_length` is their number of tokens and the tensors
    are not used. `columns` counts all columns so far, and `aligned` states that no row has padding between tokens of
    one document.
    """

    position_ids: Int[Tensor, " b"]
    segment_ids: Int[Tensor, " b"]
    contiguous_length: int | None = 0
    columns: int = 0
    aligned: bool = True


def check_token_rows(tokens: Tensor) -> None:
    """Raise UserError unless tokens are whole numbers in rows."""
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise UserError(
            f"tokens must be whole numbers of shape (batch, length), and these are {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}"
        )


def check_length(length: int, max_length: int | None) -> None:
    """Raise ValueError for a sequence of more than `max_length` tokens; None is no limit."""
    if max_length is not None and length > max_length:
        raise ValueError(f"{length} tokens are more than this model allows: it was built with max_length={max_length}")


def check_token_range(tokens: Int[Tensor, "b l"], vocab: int) -> None:
    """Raise UserError for a token that is none of `vocab`; other devices than a CPU would have to wait for the answer.

    A compiled model does not check either.
    """
    if not is_readable(tokens) or not tokens.numel():
        return
    # NumPy reduces few numbers several times faster than torch
    ids = tokens.numpy()
    if ids.min() < 0 or ids.max() >= vocab:
        raise_token_error(tokens, vocab)


def raise_token_error(tokens: Int[Tensor, "b l"], vocab: int) -> None:
    """Raise UserError for the first token that is none of `vocab`, if there is one."""
    for row, column in ((tokens < 0) | (tokens >= vocab)).nonzero()[:1].tolist():
        raise UserError(
            f"token {int(tokens[row, column])} in row {row}, column {column}: this model was built with vocab={vocab}, "
            f"so tokens must be 0 to {vocab - 1}"
        )


def empty_tail(batch: int, device: torch.device) -> StreamTail:
    """The tail before any token."""
    position_ids = torch.full((batch,), -1, device=device)
    return StreamTail(position_ids, torch.full_like(position_ids, UNSTARTED_SEGMENT), 0)


def positions_of(
    tokens: Int[Tensor, "b l"],
    segments: Int[Tensor, "b l"] | None,
    tail: StreamTail | None,
    layout: SegmentLayout = None,
) -> tuple[TokenPositions, StreamTail | None]:
    """The positions of `tokens`, and the tail after them if one was given.

    Without `segments` the tokens continue the document of their row. `layout` is what a batch knows of the segments;
    without it they are read where that is free. Raises ValueError if shapes disagree.
    """
    check_token_rows(tokens)
    batch, length = tokens.shape
    if segments is not None and segments.shape != tokens.shape:
        raise ValueError(f"segments {tuple(segments.shape)} must have the shape of the tokens {tuple(tokens.shape)}")
    contiguous_length = 0 if tail is None else tail.contiguous_length
    # a layout counts from the first column of a stream
    if segments is not None and contiguous_length == 0:
        layout = segment_layout(segments, layout)
    else:
        layout = None
    if contiguous_length is not None and (segments is None or isinstance(layout, ContiguousLayout)):
        end = contiguous_length + length
        positions = contiguous_positions(batch, contiguous_length, end, tokens.device)
        if tail is None:
            return positions, None
        # the compiler of torch 2.11 cannot keep tuples that `_replace` has made, here and below
        return positions, StreamTail(tail.position_ids, tail.segment_ids, end, end, tail.aligned)
    start_tail = materialize_tail(empty_tail(batch, tokens.device) if tail is None else tail)
    if segments is None:
        current = torch.where(start_tail.segment_ids == UNSTARTED_SEGMENT, 0, start_tail.segment_ids)
        segments = current[:, None].expand(batch, length)
        aligned = start_tail.aligned
    else:
        aligned = _is_aligned(segments, start_tail)
    position_ids, last = _count_positions(segments, start_tail)
    if tail is None:
        return TokenPositions(position_ids, segments, layout), None
    end_tail = StreamTail(last.position_ids, last.segment_ids, last.contiguous_length, last.columns, aligned)
    if layout is None and aligned:
        return TokenPositions(position_ids, segments, AlignedLayout(start_tail.columns)), end_tail
    return TokenPositions(position_ids, segments, layout), end_tail


def materialize_tail(tail: StreamTail) -> StreamTail:
    """The tail with valid tensors in place of `contiguous_length`."""
    if tail.contiguous_length is None:
        return tail
    if tail.contiguous_length == 0:
        return empty_tail(tail.position_ids.shape[0], tail.position_ids.device)._replace(contiguous_length=None)
    return StreamTail(
        torch.full_like(tail.position_ids, tail.contiguous_length - 1),
        torch.zeros_like(tail.segment_ids),
        None,
        tail.contiguous_length,
    )


def _count_positions(segment_ids: Int[Tensor, "b l"], start_tail: StreamTail) -> tuple[Int[Tensor, "b l"], StreamTail]:
    """Positions as the number of tokens since the last change of segment, not counting padding; and the next tail."""
    valid = segment_ids != PADDING_SEGMENT
    column = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    last = torch.where(valid, column, -1).cummax(1).values
    earlier = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], dim=1)
    previous = torch.where(earlier < 0, start_tail.segment_ids[:, None], segment_ids.gather(1, earlier.clamp(min=0)))
    starts = valid & (segment_ids != previous)
    count = valid.cumsum(1)
    base = torch.where(starts, count - 1, -1).cummax(1).values
    position_ids = torch.where(base < 0, start_tail.position_ids[:, None] + count, count - 1 - base)
    final = last[:, -1:]
    end_position = torch.where(final < 0, start_tail.position_ids[:, None], position_ids.gather(1, final.clamp(min=0)))
    end_segment = torch.where(final < 0, start_tail.segment_ids[:, None], segment_ids.gather(1, final.clamp(min=0)))
    # padding before the first token has no position; 0 avoids the invalid table index -1
    columns = start_tail.columns + segment_ids.shape[1]
    return position_ids.clamp(min=0), StreamTail(end_position[:, 0], end_segment[:, 0], None, columns)


def _is_aligned(segments: Int[Tensor, "b l"], start_tail: StreamTail) -> bool:
    """Whether the segment ids of each row ascend, without padding after tokens; False where they cannot be read.

    No document is then in several pieces, and none continues after padding, whose id is the lowest.
    """
    if not is_readable(segments) or not segments.numel():
        return False
    ids = segments.numpy()
    last = start_tail.segment_ids.numpy()
    if (ids[:, 1:] < ids[:, :-1]).any() or (ids[:, 0] < last).any():
        return False
    # padding may have split earlier documents, but not new ones
    return start_tail.aligned or bool((ids[:, 0] > last).all())
