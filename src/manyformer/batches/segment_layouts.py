"""What segment ids say about the documents of rows: read on the host by what makes batches, which carry it.

A device would have to be waited for to read them there.
"""

from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout

SegmentLayout = PackedLayout | ContiguousLayout | None

B = TypeVar("B")


def with_layouts(batch: B) -> B:
    """The batch with the layouts of its segment ids that are on the host, in the fields beside them.

    A field `NAME_layout`, or `layout`, belongs to the segment ids `NAME_segments`, or `segments`."""
    layouts = {}
    for name in getattr(batch, "_fields", ()):
        if name.endswith("layout") and getattr(batch, name) is None:
            segments = getattr(batch, f"{name.removesuffix('layout')}segments")
            if segments is not None and segments.device.type == "cpu":
                layouts[name] = read_segment_layout(segments)
    if not layouts:
        return batch
    replaced: B = batch._replace(**layouts)  # type: ignore[attr-defined]
    return replaced


def segment_layout(segments: Int[Tensor, "b l"], known: SegmentLayout = None) -> SegmentLayout:
    """The layout of these segment ids if it is `known` or can be read, which it cannot where they are on a device.

    A graph that is being compiled knows none: it would be compiled again for the documents of each batch.
    """
    if torch.compiler.is_compiling():
        return None
    if known is not None or segments.device.type != "cpu":
        return known
    return read_segment_layout(segments)


def read_segment_layout(segments: Int[Tensor, "b l"]) -> SegmentLayout:
    """The layout of segment ids on the host; None where a document is in several pieces, which has no simple layout."""
    ids = segments.numpy()
    if ids.shape[1] and not ids.any():
        return ContiguousLayout()
    if not ids.size:
        return PackedLayout(())
    is_start = np.ones(ids.shape, dtype=bool)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=is_start[:, 1:])
    rows, starts = is_start.nonzero()
    documents = ids[rows, starts]
    is_same_row = rows[1:] == rows[:-1]
    # a document ends where the next one of its row begins, or with the row
    stops = np.full_like(starts, ids.shape[1])
    stops[:-1][is_same_row] = starts[1:][is_same_row]
    if (documents == PADDING_SEGMENT).any():
        is_document = documents != PADDING_SEGMENT
        rows, starts, stops, documents = (part[is_document] for part in (rows, starts, stops, documents))
        is_same_row = rows[1:] == rows[:-1]
    # ids that ascend, as packing numbers them, do not repeat
    if not (documents[1:] > documents[:-1])[is_same_row].all():
        order = np.lexsort((documents, rows))
        rows_in_order, documents_in_order = rows[order], documents[order]
        is_repeated = documents_in_order[1:] == documents_in_order[:-1]
        if (is_repeated & (rows_in_order[1:] == rows_in_order[:-1])).any():
            return None
    return PackedLayout(tuple(zip(rows.tolist(), starts.tolist(), stops.tolist())), tuple(documents.tolist()))
