"""What segment ids say about the documents of rows, against a loop over runs; batches carry it, and layers use it."""

import itertools

import numpy as np
import pytest
import torch

from manyformer.analysis.own_models import build_tiny
from manyformer.data.batching.epochs import Epoch, HeldOutBatches
from manyformer.nn.batches import IGNORE_INDEX, Batch, CausalLMBatch, Seq2SeqBatch, to_device
from manyformer.nn.batches.batch import SegmentLayout, read_segment_layout, segment_layout, with_layouts
from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout
from manyformer.recipes.parts.registry import task_of

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


def test_a_batch_on_a_device_says_what_the_host_has_read() -> None:
    tokens, segments = torch.zeros(1, 4, dtype=torch.long), torch.tensor([[0, 0, 1, -1]])
    on_device = to_device(CausalLMBatch(tokens, tokens, segments), META)
    assert on_device.layout == PackedLayout(((0, 0, 2), (0, 2, 3)))
    assert on_device.segments is not None
    # of the ids alone nothing is known there
    assert segment_layout(on_device.segments) is None
    pairs = to_device(Seq2SeqBatch(tokens, tokens, tokens, segments * 0, segments), META)
    assert pairs.source_layout == ContiguousLayout()
    assert pairs.target_layout == PackedLayout(((0, 0, 2), (0, 2, 3)))


def test_a_batch_without_segments_or_with_split_documents_says_nothing() -> None:
    tokens = torch.zeros(1, 3, dtype=torch.long)
    assert with_layouts(CausalLMBatch(tokens, tokens)).layout is None
    assert with_layouts(CausalLMBatch(tokens, tokens, torch.tensor([[1, 0, 1]]))).layout is None


def test_loaded_rows_carry_the_layout_of_their_process() -> None:
    segments = torch.tensor([[0, 0, 1], [0, 1, 2], [0, -1, -1]])

    class OneBatch(Epoch):
        def __len__(self) -> int:
            return 1

        def batch(self, number: int) -> Batch:
            return CausalLMBatch(segments, segments, segments)

    rows = HeldOutBatches(OneBatch(), None)
    layouts = [batch.layout for part in (rows, rows.shard(1, 2)) for batch in part]  # type: ignore[attr-defined]
    assert layouts[0] == PackedLayout(((0, 0, 2), (0, 2, 3), (1, 0, 1), (1, 1, 2), (1, 2, 3), (2, 0, 1)))
    assert layouts[1] == PackedLayout(((0, 0, 1), (0, 1, 2), (0, 2, 3)))


def test_pieces_of_a_batch_forget_where_its_documents_are() -> None:
    segments = torch.tensor([[0, 0, 1, 1]])
    batch = with_layouts(CausalLMBatch(segments, segments, segments, text_positions=segments))
    pieces = list(batch.in_pieces(3))
    assert [piece.layout for piece in pieces] == [None, None]
    assert [piece.segments.tolist() for piece in pieces if piece.segments is not None] == [[[0, 0, 1]], [[1]]]


def test_what_a_layout_knows_of_its_documents() -> None:
    layout = read_segment_layout(torch.tensor([[5, 5, 2, -1], [-1, -1, 7, -1], [-1] * 4]))
    assert isinstance(layout, PackedLayout)
    assert (layout.most_in_row, layout.longest, layout.token_count) == (2, 2, 4)
    assert layout.ids_of_rows(3) == [[2, 5], [7], []]
    assert layout.distinct_ids == [2, 5, 7]
    assert layout.repeated(3).documents == ((0, 0, 6), (0, 6, 9), (1, 6, 9))
    assert PackedLayout(()).most_in_row == PackedLayout(()).longest == 0


@pytest.mark.parametrize(
    "recipe",
    [
        *("bigbird-etc", "infini-attention", "linformer", "lstm-lm", "mixtral", "moba", "nsa", "nystromformer"),
        *("perceiver", "performer-encoder", "routing-transformer", "sinkhorn-encoder", "sinkhorn-transformer"),
    ],
)
def test_layers_that_believe_a_layout_compute_what_they_read_without_it(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny(recipe, {}, 0)
    task = task_of(model)
    length = task.fixed_length(model) or 24
    generator = torch.Generator().manual_seed(0)
    segments = torch.zeros(2, length, dtype=torch.long)
    segments[0, length // 3 :], segments[0, -3:], segments[1, :2] = 1, PADDING_SEGMENT, PADDING_SEGMENT
    inputs = task.example(model, torch.randint(task.token_ids(model), (2, length), generator=generator))
    targets = task.random_targets(model, inputs, generator).masked_fill(segments == PADDING_SEGMENT, IGNORE_INDEX)
    batch = task.batch(model, inputs._replace(segments=segments), targets)
    losses = []
    for path in ("known", "read"):
        if path == "read":
            monkeypatch.setattr("manyformer.models.embedding.segment_layout", lambda *_: None)
        torch.manual_seed(0)
        losses.append(float(model.train().loss(with_layouts(batch)).total.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
