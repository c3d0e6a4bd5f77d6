"""From segment numbers to places: positions restart in every document and go on where a state left off."""

import itertools
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.core import PADDING, Lined, Packed, Place, Plain

FRESH = -2
"""The segment number of a row that has seen no token yet."""


class Tail(NamedTuple):
    """Where each row stands: the last real token's position and segment, or `plain` = tokens so far where rows agree.

    As long as all rows are one document without padding, `plain` is a number and the tensors are not looked at.
    `columns` counts all columns so far, and `lined` says that no row has padding between tokens of one document.
    """

    pos: Int[Tensor, " b"]
    seg: Int[Tensor, " b"]
    plain: int | None = 0
    columns: int = 0
    lined: bool = True


def fresh(batch: int, device: torch.device) -> Tail:
    """The tail before any token."""
    pos = torch.full((batch,), -1, device=device)
    return Tail(pos, torch.full_like(pos, FRESH), 0)


def locate(
    tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None, tail: Tail | None
) -> tuple[Place, Tail | None]:
    """The places of `tokens`, and the tail after them where there was one before.

    Without `segments` the tokens go on with the document of their row. Raises ValueError where shapes disagree.
    """
    batch, length = tokens.shape
    if segments is not None and segments.shape != tokens.shape:
        raise ValueError(f"segments {tuple(segments.shape)} must have the shape of the tokens {tuple(tokens.shape)}")
    plain = 0 if tail is None else tail.plain
    layout = _layout(segments) if segments is not None and plain == 0 else None
    if plain is not None and (segments is None or isinstance(layout, Plain)):
        pos = torch.arange(plain, plain + length, device=tokens.device).expand(batch, -1)
        seg = torch.zeros((), dtype=torch.long, device=tokens.device).expand(batch, length)
        end = plain + length
        return Place(pos, seg, Plain(plain)), None if tail is None else tail._replace(plain=end, columns=end)
    before = _explicit(fresh(batch, tokens.device) if tail is None else tail)
    if segments is None:
        segments = torch.where(before.seg == FRESH, 0, before.seg)[:, None].expand(batch, length)
        lined = before.lined
    else:
        lined = _lined(segments, before)
    pos, after = _continue(segments, before)
    if tail is None:
        return Place(pos, segments, layout), None
    if layout is None and lined:
        return Place(pos, segments, Lined(before.columns)), after._replace(lined=True)
    return Place(pos, segments, layout), after._replace(lined=lined)


def _explicit(tail: Tail) -> Tail:
    """The tail with its tensors filled in."""
    if tail.plain is None:
        return tail
    if tail.plain == 0:
        return fresh(tail.pos.shape[0], tail.pos.device)._replace(plain=None)
    return Tail(torch.full_like(tail.pos, tail.plain - 1), torch.zeros_like(tail.seg), None, tail.plain)


def _continue(seg: Int[Tensor, "b l"], before: Tail) -> tuple[Int[Tensor, "b l"], Tail]:
    """Positions by counting real tokens since the last change of segment; padding counts for nothing."""
    real = seg != PADDING
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
    return pos.clamp(min=0), Tail(after_pos[:, 0], after_seg[:, 0], None, before.columns + seg.shape[1])


def _lined(segments: Int[Tensor, "b l"], before: Tail) -> bool:
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


def _layout(segments: Int[Tensor, "b l"]) -> Packed | Plain | None:
    """What the numbers say, where reading them is free; a device would have to be waited for."""
    if segments.device.type != "cpu":
        return None
    numbers = segments.numpy()
    rows, length = numbers.shape
    if length and not numbers.any():
        return Plain()
    edges = np.ones((rows, length + 1), dtype=bool)
    edges[:, 1:-1] = numbers[:, 1:] != numbers[:, :-1]
    documents: list[tuple[int, int, int]] = []
    seen: set[tuple[int, int]] = set()
    for row in range(rows):
        cuts = np.flatnonzero(edges[row]).tolist()
        for begin, end in itertools.pairwise(cuts):
            number = int(numbers[row, begin])
            if number == PADDING:
                continue
            if (row, number) in seen:
                # a document in several pieces is nothing that a simple layout can tell
                return None
            seen.add((row, number))
            documents.append((row, begin, end))
    return Packed(tuple(documents))
