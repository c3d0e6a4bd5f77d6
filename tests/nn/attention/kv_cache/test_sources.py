"""Caches: growing and preallocated ones remember the same, and full ones say so."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyformer.models.embedding import StreamTail, empty_tail, positions_of
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.core import PADDING_SEGMENT, Context, MemorySequence, TokenPositions, tree_map
from manyformer.nn.masks import Causal

DIM, HEADS = 12, 4
CPU = torch.device("cpu")


def attention(*, cross: bool = False) -> Attention:
    mask = None if cross else Causal()
    return Attention(
        DIM, HEADS, SoftmaxKernel(mask), kv_heads=2, value_dim=5, source=CrossAttentionSource() if cross else None
    ).double()


def begin(layer: Attention, batch: int, capacity: int | None = None) -> Any:
    return layer.init_state(batch, capacity=capacity, device=CPU, dtype=torch.float64)


def place_of(segments: Tensor | None, batch: int, length: int, tail: StreamTail | None) -> tuple[TokenPositions, Any]:
    return positions_of(torch.zeros(batch, length, dtype=torch.long), segments, tail)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_cutting_into_calls_is_one_call(data: st.DataObject) -> None:
    """Padding anywhere, documents anywhere, with and without reserved room, against one call without a cache."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    batch, length = 2, data.draw(st.integers(1, 8))
    numbers = st.lists(st.integers(PADDING_SEGMENT, 1), min_size=length, max_size=length)
    # a document in several pieces restarts its positions, so that order within it is not that of time
    simple = [sorted(data.draw(numbers)) for _ in range(batch)]
    segments = torch.tensor(simple) if data.draw(st.booleans()) else torch.zeros(batch, length, dtype=torch.long)
    x = torch.randn(batch, length, DIM, dtype=torch.float64)
    layer = attention()
    real = segments != PADDING_SEGMENT
    with torch.no_grad():
        full = layer(x, Context(place_of(segments, batch, length, None)[0])).y
        for capacity in (None, length, length + 3):
            state, tail, at, parts = begin(layer, batch, capacity), empty_tail(batch, CPU), 0, []
            while at < length:
                end = data.draw(st.integers(at + 1, length))
                place, tail = place_of(segments[:, at:end], batch, end - at, tail)
                out = layer(x[:, at:end], Context(place), state)
                state, at = out.state, end
                parts.append(out.y)
            torch.testing.assert_close(torch.cat(parts, 1)[real], full[real], atol=1e-12, rtol=0)


def test_a_growing_cache_carries_gradients() -> None:
    layer, x = attention(), torch.randn(2, 6, DIM, dtype=torch.float64, requires_grad=True)
    full = layer(x, Context(place_of(None, 2, 6, None)[0])).y
    (expected,) = torch.autograd.grad(full.sin().sum(), x)
    state, tail, parts = begin(layer, 2), empty_tail(2, CPU), []
    for part in x.split([4, 1, 1], dim=1):
        place, tail = place_of(None, 2, part.shape[1], tail)
        y, state, _ = layer(part, Context(place), state)
        parts.append(y)
    (gradient,) = torch.autograd.grad(torch.cat(parts, 1).sin().sum(), x)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)


def test_rows_of_a_state_can_be_taken_by_anyone() -> None:
    """What beam search does: after a reordering each row goes on as if it had always been there."""
    layer, x = attention(), torch.randn(3, 5, DIM, dtype=torch.float64)
    order = torch.tensor([2, 0, 0])
    with torch.no_grad():
        expected = layer(x[order], Context(place_of(None, 3, 5, None)[0])).y[:, -1:]
        for capacity in (None, 5):
            place, tail = place_of(None, 3, 4, empty_tail(3, CPU))
            state = layer(x[:, :4], Context(place), begin(layer, 3, capacity)).state
            state = tree_map(lambda tensor: tensor.index_select(0, order), state)
            place, _ = place_of(None, 3, 1, tail)
            y = layer(x[order][:, 4:], Context(place), state).y
            torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)


def test_reserved_room_is_written_in_place() -> None:
    layer = attention()
    state = begin(layer, 1, 4)
    where = [tensor.data_ptr() for tensor in (state.source.k, state.source.v)]
    with torch.no_grad():
        for _ in range(4):
            place, _tail = place_of(None, 1, 1, empty_tail(1, CPU)._replace(contiguous_length=state.source.length))
            state = layer(torch.ones(1, 1, DIM, dtype=torch.float64), Context(place), state).state
    assert [tensor.data_ptr() for tensor in (state.source.k, state.source.v)] == where


def test_a_full_cache_says_what_it_needs() -> None:
    layer, x = attention(), torch.zeros(1, 5, DIM, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(ValueError, match="created with capacity=4, but 5 tokens need space"):
        layer(x, Context(place_of(None, 1, 5, None)[0]), begin(layer, 1, 4))


def test_writing_in_place_refuses_gradients() -> None:
    layer, x = attention(), torch.zeros(1, 2, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"use it under torch.no_grad\(\), or create it without capacity"):
        layer(x, Context(place_of(None, 1, 2, None)[0]), begin(layer, 1, 4))


def test_an_encoders_keys_are_projected_once() -> None:
    layer = attention(cross=True)
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    source, unequal = (
        torch.randn(2, 7, DIM, dtype=torch.float64),
        torch.tensor([[0] * 7, [0] * 3 + [PADDING_SEGMENT] * 4]),
    )
    memory = MemorySequence(source, place_of(unequal, 2, 7, None)[0]._replace(layout=None))
    calls: list[Any] = []
    layer.kv_proj.register_forward_hook(lambda *call: calls.append(call))
    place, _ = place_of(None, 2, 4, None)
    full = layer(x, Context(place, memory)).y
    state, parts = begin(layer, 2), []
    for number in range(4):
        place, _ = place_of(None, 2, 1, empty_tail(2, CPU)._replace(contiguous_length=number))
        y, state, _ = layer(x[:, number : number + 1], Context(place, memory), state)
        parts.append(y)
    assert len(calls) == 2
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-12, rtol=0)
    # padding of the source is seen by nobody
    other = MemorySequence(torch.where((unequal == PADDING_SEGMENT)[..., None], 99.0, source), memory.positions)
    torch.testing.assert_close(layer(x, Context(place_of(None, 2, 4, None)[0], other)).y, full, atol=1e-12, rtol=0)


def test_cross_attention_without_a_memory_is_an_error() -> None:
    with pytest.raises(ValueError, match="cross-attention needs a sequence"):
        attention(cross=True)(torch.zeros(1, 2, DIM, dtype=torch.float64), Context(place_of(None, 1, 2, None)[0]))
