"""Caches that forget: whatever a mask can no longer show is gone, and nobody can tell."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyformer.models.embedding import empty_tail, positions_of
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn import masks as m
from manyformer.nn.attention.kv_cache import SelfSource, WindowSource
from manyformer.nn.core import PADDING_SEGMENT, Context, tree_map
from manyformer.nn.masks import Mask
from manyformer.nn.masks.eviction import CACHED_RANGE, can_evict, evicts_all, never_evicted

DIM, HEADS = 12, 4
CPU = torch.device("cpu")

MASKS: dict[str, Mask] = {
    "window": m.Window(4),
    "window of one": m.Window(1),
    "dilated": m.Window(3, dilation=2),
    "sinks": m.Causal() & (m.Window(3) | m.VisibleToAll(m.FirstTokens(2))),
    "fixed": m.union(m.fixed_pattern(4, 1)),
    "heads": m.PerHead({0: m.Window(5), 2: m.Causal() & m.VisibleToAll(m.AtPositions(3))}, default=m.Window(2)),
    "blocks": m.Causal() & m.LocalBlocks(3, lookback=2),
    "image": m.Local2D(4, 1, 2, 1, 1),
}


def attention(mask: Mask) -> Attention:
    return Attention(DIM, HEADS, SoftmaxKernel(mask), kv_heads=2, value_dim=5).double()


def begin(layer: Attention, batch: int, capacity: int | None) -> Any:
    return layer.init_state(batch, capacity=capacity, device=CPU, dtype=torch.float64)


@pytest.mark.parametrize("name", MASKS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_cutting_into_calls_is_one_call(name: str, data: st.DataObject) -> None:
    """Padding anywhere, packed documents, calls of one and of many tokens, with and without reserved room."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    batch, length = 2, data.draw(st.integers(1, 14))
    numbers = st.lists(st.integers(PADDING_SEGMENT, 1), min_size=length, max_size=length)
    simple = [sorted(data.draw(numbers)) for _ in range(batch)]
    for row in simple:
        # and some on the right
        for column in range(length - data.draw(st.integers(0, 2)), length):
            row[column] = PADDING_SEGMENT
    segments = torch.tensor(simple) if data.draw(st.booleans()) else torch.zeros(batch, length, dtype=torch.long)
    x = torch.randn(batch, length, DIM, dtype=torch.float64)
    layer, real = attention(MASKS[name]), segments != PADDING_SEGMENT
    none = torch.zeros(batch, length, dtype=torch.long)
    with torch.no_grad():
        full = layer(x, Context(positions_of(none, segments, None)[0])).y
        for capacity in (None, length + 9):
            state, tail, at, parts = begin(layer, batch, capacity), empty_tail(batch, CPU), 0, []
            while at < length:
                end = data.draw(st.integers(at + 1, length))
                place, tail = positions_of(none[:, at:end], segments[:, at:end], tail)  # type: ignore[assignment]
                y, state, _ = layer(x[:, at:end], Context(place), state)
                at = end
                parts.append(y)
            torch.testing.assert_close(torch.cat(parts, 1)[real], full[real], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", MASKS)
def test_memory_stays_what_the_mask_can_show(name: str) -> None:
    layer, sizes = attention(MASKS[name]), []
    with torch.no_grad():
        for capacity in (None, 60):
            state, tail = begin(layer, 1, capacity), empty_tail(1, CPU)
            for _ in range(60):
                place, tail = positions_of(torch.zeros(1, 1, dtype=torch.long), None, tail)  # type: ignore[assignment]
                state = layer(torch.randn(1, 1, DIM, dtype=torch.float64), Context(place), state).state
                sizes.append(state.source.k.shape[2])
    # all but the fixed pattern, whose summaries are one in four, need no more after 60 tokens than after 30
    assert sizes[59] - sizes[29] == (60 // 4 - 30 // 4 if name == "fixed" else 0)
    assert sizes[59] <= (60 // 4 + 4 if name == "fixed" else 16)
    assert sizes[119] == sizes[59]


def test_a_ring_carries_gradients_and_can_be_gone_back_to() -> None:
    layer, x = attention(MASKS["sinks"]), torch.randn(2, 9, DIM, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(2, 9, dtype=torch.long)
    full = layer(x, Context(positions_of(none, None, None)[0])).y
    (expected,) = torch.autograd.grad(full.sin().sum(), x)
    state, tail, at, parts = begin(layer, 2, None), empty_tail(2, CPU), 0, []
    for size in (4, 1, 1, 3):
        place, tail = positions_of(none[:, at : at + size], None, tail)  # type: ignore[assignment]
        context = Context(place)
        layer(torch.randn(2, size, DIM, dtype=torch.float64), context, state)
        y, state, _ = layer(x[:, at : at + size], context, state)
        parts.append(y)
        at += size
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-12, rtol=0)
    (gradient,) = torch.autograd.grad(torch.cat(parts, 1).sin().sum(), x)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("capacity", [None, 40])
def test_rows_can_be_reordered(capacity: int | None) -> None:
    layer, x = attention(MASKS["sinks"]), torch.randn(3, 12, DIM, dtype=torch.float64)
    order, none = torch.tensor([2, 0, 0]), torch.zeros(3, 12, dtype=torch.long)
    with torch.no_grad():
        expected = layer(x[order], Context(positions_of(none, None, None)[0])).y
        place, tail = positions_of(none[:, :9], None, empty_tail(3, CPU))
        state = layer(x[:, :9], Context(place), begin(layer, 3, capacity)).state
        state = tree_map(lambda tensor: tensor.index_select(0, order), state)
        for column in range(9, 12):
            place, tail = positions_of(none[:, :1], None, tail)
            y, state, _ = layer(x[order][:, column : column + 1], Context(place), state)
            torch.testing.assert_close(y, expected[:, column : column + 1], atol=1e-12, rtol=0)


def test_what_lasts() -> None:
    assert never_evicted(MASKS["sinks"], torch.arange(5)).tolist() == [True, True, False, False, False]
    assert never_evicted(MASKS["fixed"], torch.arange(8)).tolist() == [False, False, False, True] * 2
    everything = (
        m.Causal(),
        m.union(m.strided_pattern(4)),
        m.AllKeys(),
        m.symmetric_window(3),
        m.Causal() & ~m.Window(3),
    )
    unknown = (m.Causal() & m.RandomBlocks(4, 1, 9, past_only=True),)
    for mask in (*everything, *unknown):
        assert not can_evict(mask)
        assert type(attention(mask).source) is SelfSource
    with pytest.raises(ValueError, match=r"WindowSource: Causal\(\) may show every key to later queries"):
        WindowSource(m.Causal())
    for mask in MASKS.values():
        assert type(attention(mask).source) is WindowSource


def test_whether_anything_lasts_is_known_without_reading_positions() -> None:
    """Of rows of unlike lengths, whose positions are numbers of tensors, the number of columns is known."""
    for mask in MASKS.values():
        for length in (0, 1, 5, CACHED_RANGE, 3 * CACHED_RANGE):
            lasts = bool(never_evicted(mask, torch.arange(length)).any())
            assert not (evicts_all(mask, length) and lasts)
    assert evicts_all(MASKS["window"], 3 * CACHED_RANGE)
    late = m.Causal() & (m.Window(3) | m.VisibleToAll(m.AtPositions(CACHED_RANGE + 3)))
    assert evicts_all(late, CACHED_RANGE)
    assert not evicts_all(late, CACHED_RANGE + 4)


def test_a_ring_in_place_refuses_gradients_and_roles() -> None:
    layer, x = attention(MASKS["window"]), torch.zeros(1, 2, DIM, dtype=torch.float64)
    place = positions_of(torch.zeros(1, 2, dtype=torch.long), None, None)[0]
    with pytest.raises(ValueError, match=r"use it under torch.no_grad\(\), or create it without capacity"):
        layer(x, Context(place), begin(layer, 1, 9))
    with pytest.raises(ValueError, match="does not store roles"):
        layer(x, Context(place._replace(roles=torch.ones(1, 2, dtype=torch.long))), begin(layer, 1, None))
