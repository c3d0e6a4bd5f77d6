"""Documents scattered to rows of their own, so that positional algorithms give equal results padded or packed."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import PackedLayout, TokenPositions
from manyformer.device_reads import count_values
from manyformer.ops.segment_runs import NO_SEGMENT, segment_runs


class DocumentGrid(NamedTuple):
    """One grid row per document, with tokens in the columns of their positions.

    `slots` is the flat slot of each token, one past the end for padding; `present` counts the tokens in each slot.
    """

    slots: Int[Tensor, "b s"]
    present: Int[Tensor, "n p"]

    def scatter(self, x: Float[Tensor, "b g s e"]) -> Float[Tensor, "n g p e"]:
        """Scatter the last tokens of each row to the grid; empty slots get zeros."""
        slots = self.slots[:, self.slots.shape[1] - x.shape[2] :].flatten()
        flat = x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3])
        padded = flat.new_zeros(self.present.numel() + 1, flat.shape[1]).index_add(0, slots, flat)
        return padded[:-1].view(*self.present.shape, x.shape[1], x.shape[3]).transpose(1, 2)

    def gather(self, y: Float[Tensor, "n h p f"], count: int) -> Float[Tensor, "b h l f"]:
        """Gather the slots of the last `count` tokens of each row; zeros for padding."""
        slots = self.slots[:, self.slots.shape[1] - count :]
        flat = y.transpose(1, 2).reshape(-1, y.shape[1] * y.shape[3])
        flat = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])
        return flat[slots].view(*slots.shape, y.shape[1], y.shape[3]).transpose(1, 2)


def make_grid(
    line: Int[Tensor, "b s"],
    column: Int[Tensor, "b s"],
    valid: Bool[Tensor, "b s"],
    num_lines: int,
    columns: int | None = None,
) -> DocumentGrid:
    """The grid with tokens at grid row `line` and `column`; tokens that are not `valid` are left out.

    `columns` is their number where a layout says it; a device is read for it otherwise."""
    if columns is None:
        columns = int(torch.where(valid, column, 0).max()) + 1
    # padding goes to one extra slot, which is dropped
    slots = torch.where(valid, line * columns + column, num_lines * columns)
    present = count_values(slots, num_lines * columns + 1)[:-1].view(num_lines, columns)
    return DocumentGrid(slots, present)


def grid_by_run(key_positions: TokenPositions) -> DocumentGrid:
    """The grid with one row per run of one segment id, without padding; every batch row gets equally many."""
    segment_ids = key_positions.segment_ids
    layout = key_positions.layout
    batch = segment_ids.shape[0]
    number, valid, _ = segment_runs(segment_ids, segment_ids.new_full((batch,), NO_SEGMENT))
    if isinstance(layout, PackedLayout):
        max_runs = max(layout.most_in_row, 1)
        columns = max(layout.longest, 1)
    else:
        max_runs = max(int(number.max()), 1)
        columns = None
    line = torch.arange(batch, device=segment_ids.device)[:, None] * max_runs + (number - 1).clamp(min=0)
    return make_grid(line, key_positions.position_ids, valid, batch * max_runs, columns)
