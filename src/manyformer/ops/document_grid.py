"""Documents on lines of their own: what an algorithm does by position is then the same padded, packed or alone."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.ops.segment_runs import FRESH, segment_runs


class DocumentGrid(NamedTuple):
    """A line for each document of each row, its tokens at their positions.

    `place` is where each token goes, one past the end for padding; `present` tells how many have come to each place.
    """

    place: Int[Tensor, "b s"]
    present: Int[Tensor, "n p"]

    def scatter(self, x: Float[Tensor, "b g s e"]) -> Float[Tensor, "n g p e"]:
        """Tokens, the last ones of each row, on the grid; where there is none there are zeros."""
        place = self.place[:, self.place.shape[1] - x.shape[2] :].flatten()
        flat = x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3])
        laid = flat.new_zeros(self.present.numel() + 1, flat.shape[1]).index_add(0, place, flat)
        return laid[:-1].view(*self.present.shape, x.shape[1], x.shape[3]).transpose(1, 2)

    def gather(self, y: Float[Tensor, "n h p f"], count: int) -> Float[Tensor, "b h l f"]:
        """What stands at the places of the last `count` tokens of each row; zeros for padding."""
        place = self.place[:, self.place.shape[1] - count :]
        flat = y.transpose(1, 2).reshape(-1, y.shape[1] * y.shape[3])
        flat = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])
        return flat[place].view(*place.shape, y.shape[1], y.shape[3]).transpose(1, 2)


def grid(line: Int[Tensor, "b s"], column: Int[Tensor, "b s"], real: Bool[Tensor, "b s"], lines: int) -> DocumentGrid:
    """The grid whose tokens go to these lines and columns; all but the real ones are left out."""
    columns = int(torch.where(real, column, 0).max()) + 1
    # padding goes to one more place, which is cut off
    place = torch.where(real, line * columns + column, lines * columns)
    present = torch.bincount(place.flatten(), minlength=lines * columns + 1)[:-1].view(lines, columns)
    return DocumentGrid(place, present)


def by_run(key_positions: TokenPositions) -> DocumentGrid:
    """A line for each stretch of one segment number, padding apart, as many in each row as there are in any."""
    number, real, _ = segment_runs(
        key_positions.segment_ids, key_positions.segment_ids.new_full(key_positions.segment_ids.shape[:1], FRESH)
    )
    most = max(int(number.max()), 1)
    row = torch.arange(key_positions.segment_ids.shape[0], device=key_positions.segment_ids.device)[:, None]
    return grid(
        row * most + (number - 1).clamp(min=0),
        key_positions.position_ids,
        real,
        key_positions.segment_ids.shape[0] * most,
    )
