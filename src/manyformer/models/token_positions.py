"""From segment numbers to places: positions restart in every document and go on where a state left off."""

import itertools
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, AlignedLayout, ContiguousLayout, PackedLayout, TokenPositions

FRESH = -2
"""The segment number of a row that has seen no token yet."""


class StreamTail(NamedTuple):
    """Where each row stands: the last real token's position and segment, or `contiguous_length` = tokens so far where
    rows agree.

    As long as all rows are one document without padding, `contiguous_length` is a number and the tensors are not looked
    at. `columns` counts all columns so far, and `lined` says that no row has padding between tokens of one document.
    """

    pos: Int[Tensor, " b"]
    seg: Int[Tensor, " b"]
    contiguous_length: int | None = 0
    columns: int = 0
    lined: bool = True


def empty_tail(batch: int, device: torch.device) -> StreamTail:
    """The tail before any token."""
    pos = torch.full((batch,), -1, device=device)
    return StreamTail(pos, torch.full_like(pos, FRESH), 0)


def positions_of(
    tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None, tail: StreamTail | None
) -> tuple[TokenPositions, StreamTail | None]:
    """The places of `tokens`, and the tail after them where there was one before.

    Without `segments` the tokens go on with the document of their row. Raises ValueError where shapes disagree.
    """
    batch, length = tokens.shape
    if segments is not None and segments.shape != tokens.shape:
        raise ValueError(f"segments {tuple(segments.shape)} must have the shape of the tokens {tuple(tokens.shape)}")
    plain = 0 if tail is None else tail.contiguous_length
    layout = _layout(segments) if segments is not None and plain == 0 else None
    if plain is not None and (segments is None or isinstance(layout, ContiguousLayout)):
        pos = torch.arange(plain, plain + length, device=tokens.device).expand(batch, -1)
        seg = torch.zeros((), dtype=torch.long, device=tokens.device).expand(batch, length)
        end = plain + length
        return TokenPositions(pos, seg, ContiguousLayout(plain)), None if tail is None else tail._replace(
            contiguous_length=end, columns=end
        )
    before = _explicit(empty_tail(batch, tokens.device) if tail is None else tail)
    if segments is None:
        segments = torch.where(before.seg == FRESH, 0, before.seg)[:, None].expand(batch, length)
        lined = before.lined
    else:
        lined = _lined(segments, before)
    pos, after = _continue(segments, before)
    if tail is None:
        return TokenPositions(pos, segments, layout), None
    if layout is None and lined:
        return TokenPositions(pos, segments, AlignedLayout(before.columns)), after._replace(lined=True)
    return TokenPositions(pos, segments, layout), after._replace(lined=lined)


def _explicit(tail: StreamTail) -> StreamTail:
    """The tail with its tensors filled in."""
    if tail.contiguous_length is None:
        return tail
    if tail.contiguous_length == 0:
        return empty_tail(tail.pos.shape[0], tail.pos.device)._replace(contiguous_length=None)
    return StreamTail(
        torch.full_like(tail.pos, tail.contiguous_length - 1), torch.zeros_like(tail.seg), None, tail.contiguous_length
    )


def _continue(seg: Int[Tensor, "b l"], before: StreamTail) -> tuple[Int[Tensor, "b l"], StreamTail]:
    """Positions by counting real tokens since the last change of segment; padding counts for nothing."""
    real = seg != PADDING_SEGMENT
    column = torch.arange(seg.shape[1], device=seg.device)
    last = torch.where(real, column, -1).cummax(1).values
    earlier = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], dim=1)
    previous = torch.where(earlier < 0, before.seg[:, None], seg.gather(1, earlier.clamp(min=0)))
    begins = real & (seg != previous)
    count = real.cumsum(1)
    base = torch.where(begins, count - 1, -1).cummax(1).values
    pos = torch.where(base < 0, before.pos[:, None] + count, count - 1 - base)
    final = last[:, -1:]
    after_pos = torch.where(final < 0, before.pos[:, None], pos.gather(1, final.clamp(min=0)))
    after_seg = torch.where(final < 0, before.seg[:, None], seg.gather(1, final.clamp(min=0)))
    # a padding token before the first real one has no position; 0 keeps tables from being asked for -1
    return pos.clamp(min=0), StreamTail(after_pos[:, 0], after_seg[:, 0], None, before.columns + seg.shape[1])


def _lined(segments: Int[Tensor, "b l"], before: StreamTail) -> bool:
    """Whether documents stand in rising order without padding after them, where reading their numbers is free.

    No document is then in several pieces, and none goes on after padding: padding has the lowest number.
    """
    if segments.device.type != "cpu" or not segments.numel():
        return False
    numbers, last = segments.numpy(), before.seg.numpy()
    if (numbers[:, 1:] < numbers[:, :-1]).any() or (numbers[:, 0] < last).any():
        return False
    # padding may have parted old documents, but not these
    return before.lined or bool((numbers[:, 0] > last).all())


def _layout(segments: Int[Tensor, "b l"]) -> PackedLayout | ContiguousLayout | None:
    """What the numbers say, where reading them is free; a device would have to be waited for."""
    if segments.device.type != "cpu":
        return None
    numbers = segments.numpy()
    rows, length = numbers.shape
    if length and not numbers.any():
        return ContiguousLayout()
    edges = np.ones((rows, length + 1), dtype=bool)
    edges[:, 1:-1] = numbers[:, 1:] != numbers[:, :-1]
    documents: list[tuple[int, int, int]] = []
    seen: set[tuple[int, int]] = set()
    for row in range(rows):
        cuts = np.flatnonzero(edges[row]).tolist()
        for begin, end in itertools.pairwise(cuts):
            number = int(numbers[row, begin])
            if number == PADDING_SEGMENT:
                continue
            if (row, number) in seen:
                # a document in several pieces is nothing that a simple layout can tell
                return None
            seen.add((row, number))
            documents.append((row, begin, end))
    return PackedLayout(tuple(documents))
