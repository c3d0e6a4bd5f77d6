"""Documents in a row as a stream passes through them: a run is a stretch of one segment number."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT

FRESH = -2
"""The segment number of a stream that has seen no token yet."""


class SegmentRuns(NamedTuple):
    """The run of each token, 0 being the one that goes on from before; which are no padding; the last segment."""

    number: Int[Tensor, "b l"]
    real: Bool[Tensor, "b l"]
    last: Int[Tensor, " b"]


def segment_runs(seg: Int[Tensor, "b l"], before: Int[Tensor, " b"]) -> SegmentRuns:
    """Count the changes of segment, `before` being the segment of the last token so far; padding interrupts nothing.

    A document in several pieces is a new one each time, as positions have it too.
    """
    real = seg != PADDING_SEGMENT
    column = torch.arange(seg.shape[1], device=seg.device)
    last = torch.where(real, column, -1).cummax(1).values
    upto = torch.where(last < 0, before[:, None], seg.gather(1, last.clamp(min=0)))
    previous = torch.cat([before[:, None], upto[:, :-1]], dim=1)
    return SegmentRuns((real & (seg != previous)).cumsum(1), real, upto[:, -1])


def running_max(
    x: Float[Tensor, "b h l"], run: Int[Tensor, "b l"] | None, before: Float[Tensor, "b h"]
) -> Float[Tensor, "b h l"]:
    """The largest value so far within each run; run 0 (all of it where `run` is None) goes on from `before`."""
    if run is None:
        return x.cummax(-1).values.maximum(before[..., None])
    x = torch.where(run[:, None] == 0, x.maximum(before[..., None]), x)
    # doubling: each token knows the largest of 1, 2, 4, ... tokens up to itself
    reach = 1
    while reach < x.shape[-1]:
        same = (run[:, reach:] == run[:, :-reach])[:, None]
        further = torch.where(same, x[..., reach:].maximum(x[..., :-reach]), x[..., reach:])
        x = torch.cat([x[..., :reach], further], dim=-1)
        reach *= 2
    return x
