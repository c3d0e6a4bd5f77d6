"""What segment ids say about the documents of rows, against a loop over runs; and that it stays with copies of them."""

import itertools

import numpy as np
import pytest
import torch

from manyformer.batches import CausalLMBatch, Seq2SeqBatch, to_device
from manyformer.batches.segment_layouts import SegmentLayout, read_segment_layout, segment_layout
from manyformer.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout

META = torch.device("meta")


def layout_by_loop(ids: list[list[int]]) -> SegmentLayout:
    """The definition: a document is a run of one id, and no id of a row has two runs."""
    if all(segment == 0 for row in ids for segment in row) and ids and ids[0]:
        return ContiguousLayout()
    documents: list[tuple[int, int, int]] = []
    for number, row in enumerate(ids):
        column, seen = 0, set()
        for segment, run in itertools.groupby(row):
            length = len(list(run))
            if segment != PADDING_SEGMENT:
                if segment in seen:
                    return None
                seen.add(segment)
                documents.append((number, column, column + length))
            column += length
    return PackedLayout(tuple(documents))


@pytest.mark.parametrize("in_order", [False, True])
def test_the_layout_is_that_of_the_runs(in_order: bool) -> None:
    random = np.random.default_rng(0)
    kinds = set()
    for _ in range(400):
        shape = random.integers(1, 5), random.integers(0, 8)
        ids = random.integers(-1, 4, shape)
        ids = np.sort(ids, axis=1) if in_order else ids
        layout = read_segment_layout(torch.from_numpy(ids))
        assert layout == layout_by_loop(ids.tolist()), ids
        kinds.add(type(layout))
    assert PackedLayout in kinds
    assert (type(None) in kinds) is not in_order


def test_padding_and_documents_that_come_again() -> None:
    assert read_segment_layout(torch.tensor([[-1, -1]])) == PackedLayout(())
    assert read_segment_layout(torch.tensor([[3, 3], [3, -1]])) == PackedLayout(((0, 0, 2), (1, 0, 1)))
    assert read_segment_layout(torch.tensor([[1, 0, 1]])) is None
    assert read_segment_layout(torch.tensor([[2, -1, 2]])) is None
    assert read_segment_layout(torch.tensor([[0, 0], [0, 0]])) == ContiguousLayout()


def test_a_device_knows_what_the_host_has_read_and_no_more() -> None:
    tokens, segments = torch.zeros(1, 4, dtype=torch.long), torch.tensor([[0, 0, 1, -1]])
    on_device = to_device(CausalLMBatch(tokens, tokens, segments), META)
    assert on_device.segments is not None
    assert segment_layout(on_device.segments) == PackedLayout(((0, 0, 2), (0, 2, 3)))
    # a tensor made from it is another one, of which nothing is known
    assert segment_layout(on_device.segments.clone()) is None
    pairs = to_device(Seq2SeqBatch(tokens, tokens, tokens, segments * 0, segments), META)
    assert pairs.source_segments is not None
    assert pairs.target_segments is not None
    assert segment_layout(pairs.source_segments) == ContiguousLayout()
    assert segment_layout(pairs.target_segments) == PackedLayout(((0, 0, 2), (0, 2, 3)))
