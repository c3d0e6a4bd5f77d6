"""Runs of documents within rows of a stream: a run is a maximal range of tokens of one segment."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT

NO_SEGMENT = -2
"""The segment id that stands for a stream without any token so far."""


class SegmentRuns(NamedTuple):
    """The run of each token, 0 for the one that continues the previous call's; the mask of tokens; the last segment."""

    run_ids: Int[Tensor, "b l"]
    valid: Bool[Tensor, "b l"]
    last_segment: Int[Tensor, " b"]


def segment_runs(segment_ids: Int[Tensor, "b l"], last_segment: Int[Tensor, " b"]) -> SegmentRuns:
    """Number the runs; `last_segment` is the segment of the stream's last token, and padding does not end a run.

    A segment that occurs in several pieces is a new run each time; its positions restart as well.
    """
    valid = segment_ids != PADDING_SEGMENT
    column = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    last = torch.where(valid, column, -1).cummax(1).values
    latest_segment = torch.where(last < 0, last_segment[:, None], segment_ids.gather(1, last.clamp(min=0)))
    previous = torch.cat([last_segment[:, None], latest_segment[:, :-1]], dim=1)
    return SegmentRuns((valid & (segment_ids != previous)).cumsum(1), valid, latest_segment[:, -1])


def running_max(
    x: Float[Tensor, "b h l"], run: Int[Tensor, "b l"] | None, initial: Float[Tensor, "b h"]
) -> Float[Tensor, "b h l"]:
    """Cumulative maximum within each run; run 0 (everything where `run` is None) continues from `initial`."""
    if run is None:
        return x.cummax(-1).values.maximum(initial[..., None])
    x = torch.where(run[:, None] == 0, x.maximum(initial[..., None]), x)
    # doubling: the maximum over the last 1, 2, 4, ... tokens
    shift = 1
    while shift < x.shape[-1]:
        same = (run[:, shift:] == run[:, :-shift])[:, None]
        maxima = torch.where(same, x[..., shift:].maximum(x[..., :-shift]), x[..., shift:])
        x = torch.cat([x[..., :shift], maxima], dim=-1)
        shift *= 2
    return x


def decayed_running_max(
    x: Float[Tensor, "b h l"], decay: Float[Tensor, "b h l"], run: Int[Tensor, "b l"] | None, initial: Tensor
) -> Float[Tensor, "b h l"]:
    """m_t = max(m_(t-1) + decay_t, x_t); run 0 begins with `initial` (b, h), every later one with 0."""
    if run is not None:
        is_first = (run != torch.nn.functional.pad(run[:, :-1], (1, 0)))[:, None]
        # what is before the first token of a run reaches none of its tokens
        x = torch.where(is_first, x.maximum(decay), x)
        decay = decay.masked_fill(is_first, -torch.inf)
    x = torch.cat([x[..., :1].maximum(initial[..., None] + decay[..., :1]), x[..., 1:]], dim=-1)
    # doubling: the maximum over the last 1, 2, 4, ... tokens, and the sum of their decays
    shift = 1
    while shift < x.shape[-1]:
        reached = torch.cat([x[..., :shift], x[..., shift:].maximum(x[..., :-shift] + decay[..., shift:])], dim=-1)
        decay = torch.cat([decay[..., :shift], decay[..., shift:] + decay[..., :-shift]], dim=-1)
        x = reached
        shift = 2 * shift
    return x
