"""Queries and keys of documents in rows of their own, from each document's first token on, also after cached keys."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import ContiguousLayout, PackedLayout, TokenPositions
from manyformer.ops.document_grid import DocumentGrid, grid_by_run, make_grid


class DocumentRows(NamedTuple):
    """One row per document: a key is in the column of its position, a query at `positions` in its document.

    Without grids the rows of a call are the documents. `length` counts the queries of a row of the call. `is_whole`
    says that queries and keys are the same tokens."""

    key_grid: DocumentGrid | None
    query_grid: DocumentGrid | None
    positions: Int[Tensor, "#n l"]
    length: int
    is_whole: bool

    @property
    def is_contiguous(self) -> bool:
        """Whether the rows of the call are the documents."""
        return self.key_grid is None

    def keys(self, x: Float[Tensor, "b g s e"]) -> Float[Tensor, "n g p e"]:
        """What belongs to keys, in the rows of documents."""
        if self.key_grid is None:
            return x
        return self.key_grid.scatter(x)

    def queries(self, x: Float[Tensor, "b h l e"]) -> Float[Tensor, "n h m e"]:
        """What belongs to queries, in the rows of documents."""
        if self.query_grid is None:
            return x
        return self.query_grid.scatter(x)

    def gather(self, y: Float[Tensor, "n h m f"]) -> Float[Tensor, "b h l f"]:
        """The inverse of `queries`; zeros for padding."""
        if self.query_grid is None:
            return y
        return self.query_grid.gather(y, self.length)


def document_rows(query_positions: TokenPositions, key_positions: TokenPositions, length: int) -> DocumentRows:
    """The rows of documents whose last `length` tokens in each row of the call are queries."""
    query_layout = query_positions.layout
    key_layout = key_positions.layout
    device = query_positions.position_ids.device
    if isinstance(query_layout, ContiguousLayout) and key_layout == ContiguousLayout():
        start = query_layout.start
        return DocumentRows(
            None, None, torch.arange(start, start + length, device=device)[None], length, is_whole=start == 0
        )
    keys = grid_by_run(key_positions)
    rows, columns = keys.present.shape
    if isinstance(key_layout, PackedLayout) and query_layout is key_layout:
        return DocumentRows(keys, keys, torch.arange(columns, device=device)[None], length, is_whole=True)
    slots = keys.slots[:, keys.slots.shape[1] - length :]
    valid = slots < rows * columns
    row = (slots // columns).clamp(max=rows - 1)
    position = slots % columns
    first = torch.full((rows,), columns, device=device).scatter_reduce(0, row[valid], position[valid], "amin")
    queries = make_grid(row, position - first[row], valid, rows)
    positions = first[:, None] + torch.arange(queries.present.shape[1], device=device)
    return DocumentRows(keys, queries, positions, length, is_whole=False)
