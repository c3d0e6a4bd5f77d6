"""Positions and segments against a slow loop over tokens, with padding and documents anywhere, in one call or many."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyformer.models.embedding import StreamTail, empty_tail, positions_of
from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout, TokenPositions

CPU = torch.device("cpu")

Segments = list[list[int]]


@st.composite
def rows(draw: st.DrawFn, width: int | None = None, batch: int | None = None) -> Segments:
    """Any segment numbers: repeated, interleaved, padded on any side; often simple ones, which are told apart."""
    length = draw(st.integers(1, 7)) if width is None else width
    number = draw(st.sampled_from([st.just(0), st.just(3), st.integers(0, 1), st.integers(PADDING_SEGMENT, 2)]))
    row = st.lists(number, min_size=length, max_size=length)
    size = draw(st.integers(1, 3)) if batch is None else batch
    return draw(st.lists(row, min_size=size, max_size=size))


def walked(row: list[int | None], start: tuple[int, int | None] = (-1, None)) -> list[tuple[int, int] | None]:
    """(position, segment) of each token of a row; None stands for "goes on", and for the place of padding."""
    position, segment = start
    actual: list[tuple[int, int] | None] = []
    for number in row:
        if number == PADDING_SEGMENT:
            actual.append(None)
            continue
        goes_on = number is None or number == segment
        if number is None and segment is None:
            segment = 0
        position = position + 1 if goes_on else 0
        segment = segment if number is None else number
        assert segment is not None
        actual.append((position, segment))
    return actual


def assert_placed(positions: TokenPositions, expected: list[list[tuple[int, int] | None]]) -> None:
    """Positions are those of the loop; segments need only tell documents and padding apart as the loop does."""
    for row, wanted in enumerate(expected):
        for column, at in enumerate(wanted):
            segment = int(positions.segment_ids[row, column])
            assert (segment == PADDING_SEGMENT) == (at is None)
            if at is not None:
                assert int(positions.position_ids[row, column]) == at[0]


def same_documents(seen: list[Tensor], expected: list[list[tuple[int, int] | None]]) -> None:
    """Over all calls together two tokens of a row share a segment if and only if they do in the loop."""
    numbers = torch.cat(seen, dim=1).tolist()
    for row, wanted in zip(numbers, expected):
        real = [(number, at[1]) for number, at in zip(row, wanted) if at is not None]
        for ours, reference in real:
            for other, their in real:
                assert (ours == other) == (reference == their)


@given(rows())
@settings(max_examples=150, deadline=None)
def test_one_call(segments: Segments) -> None:
    numbers = torch.tensor(segments)
    place, tail = positions_of(numbers, numbers, None)
    assert tail is None
    expected = [walked(row) for row in segments]  # type: ignore[arg-type]
    assert_placed(place, expected)
    same_documents([place.segment_ids], expected)
    assert (place.position_ids >= 0).all()


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_many_calls_go_on_where_the_last_one_ended(data: st.DataObject) -> None:
    """Calls with and without segments in any order: the loop reads them as one."""
    batch = data.draw(st.integers(1, 3))
    tail: StreamTail | None = empty_tail(batch, CPU)
    fed: list[list[int | None]] = [[] for _ in range(batch)]
    seen: list[Tensor] = []
    for _ in range(data.draw(st.integers(1, 4))):
        width = data.draw(st.integers(1, 4))
        segments = data.draw(st.none() | rows(width, batch))
        before = [len(row) for row in fed]
        for row, new in zip(fed, [[None] * width] * batch if segments is None else segments):
            row.extend(new)
        numbers = None if segments is None else torch.tensor(segments)
        place, tail = positions_of(torch.zeros(batch, width, dtype=torch.long), numbers, tail)
        assert tail is not None
        assert_placed(place, [walked(row)[n:] for row, n in zip(fed, before)])
        seen.append(place.segment_ids)
    same_documents(seen, [walked(row) for row in fed])


@given(rows())
@settings(max_examples=150, deadline=None)
def test_what_is_known_without_looking_is_true(segments: Segments) -> None:
    numbers = torch.tensor(segments)
    place, _ = positions_of(numbers, numbers, None)
    match place.layout:
        case ContiguousLayout(start):
            assert start == 0
            assert all(set(row) == {0} for row in segments)
        case PackedLayout(documents):
            covered = [[PADDING_SEGMENT] * len(row) for row in segments]
            for row, begin, end in documents:
                assert len(set(segments[row][begin:end])) == 1
                assert covered[row][begin:end] == [PADDING_SEGMENT] * (end - begin)
                covered[row][begin:end] = segments[row][begin:end]
            assert covered == segments
            assert len({(row, segments[row][begin]) for row, begin, _ in documents}) == len(documents)
            assert list(documents) == sorted(documents)
        case None:
            pieces = [
                len([n for n, m in zip(row, [None, *row]) if n != m and n != PADDING_SEGMENT]) for row in segments
            ]
            assert any(n > len(set(row) - {PADDING_SEGMENT}) for n, row in zip(pieces, segments))


def test_plain_calls_stay_plain() -> None:
    tail: StreamTail | None = empty_tail(2, CPU)
    for start, width in ((0, 3), (3, 1), (4, 2)):
        place, tail = positions_of(torch.zeros(2, width, dtype=torch.long), None, tail)
        assert place.layout == ContiguousLayout(start)
        assert place.position_ids.tolist() == [list(range(start, start + width))] * 2


@pytest.mark.usefixtures("unchecked")
def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"segments \(2, 3\) must have the shape of the tokens \(2, 4\)"):
        positions_of(torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long), None)
