"""Biases and vectors by distance, against the formulas of their papers in plain loops, and against themselves."""

import math

import pytest
import torch
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, TokenPositions
from manyformer.ops.softmax_attention import softmax_attention_reference
from manyformer.position import AlibiPosition, KerplePosition, Position, ShawPosition, T5BiasPosition
from manyformer.position.distance_bias import bucket_edges
from token_rows import segment_positions


def attend(qkv: tuple[Tensor, ...], position: Position, positions: TokenPositions, causal: bool) -> Tensor:
    mask = torch.ones(1, 1, *[positions.position_ids.shape[1]] * 2, dtype=torch.bool)
    q, k, v = qkv
    scale = q.shape[-1] ** -0.5
    mask = mask.tril() if causal else mask
    return softmax_attention_reference(
        q, k, v, mask, scale=scale, position=position, query_positions=positions, key_positions=positions
    )[0]


def test_slopes_of_eight_and_of_twelve_heads() -> None:
    eight = [2.0**-n for n in range(1, 9)]
    assert AlibiPosition(8).slopes.tolist() == eight
    torch.testing.assert_close(AlibiPosition(12).slopes, torch.tensor([*eight, *(2.0 ** -(n + 0.5) for n in range(4))]))


def test_slopes_survive_a_change_of_type() -> None:
    assert AlibiPosition(12).bfloat16().slopes.equal(AlibiPosition(12).slopes)


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_is_the_formula(causal: bool) -> None:
    place, heads, length, width = segment_positions([[0] * 9]), 2, 9, 4
    q, k, v = (torch.randn(1, heads, length, width, dtype=torch.float64) for _ in range(3))
    y = attend((q, k, v), AlibiPosition(heads), place, causal)
    for h in range(heads):
        for i in range(length):
            keys = range(i + 1) if causal else range(length)
            slope = 2.0 ** (-4 * (h + 1))
            scores = [float(q[0, h, i] @ k[0, h, j]) / math.sqrt(width) - slope * abs(i - j) for j in keys]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            torch.testing.assert_close(y[0, h, i], weights @ v[0, h, : len(keys)], atol=1e-12, rtol=0)


@pytest.mark.parametrize("sides", ["past", "both"])
@pytest.mark.parametrize("each_head", [True, False])
def test_shaw_is_the_formula(sides: str, each_head: bool) -> None:
    heads, length, width, clip = 2, 9, 4, 3
    causal = sides == "past"
    position = ShawPosition(width, clip, heads=heads if each_head else None, direction=sides).double()  # type: ignore[arg-type]
    assert position.keys.shape[-2] == (clip + 1 if causal else 2 * clip + 1)
    q, k, v = (torch.randn(1, heads, length, width, dtype=torch.float64) for _ in range(3))
    y = attend((q, k, v), position, segment_positions([[0] * length]), causal)
    for h in range(heads):
        keys, values = (table[h] if each_head else table for table in (position.keys, position.values))
        for i in range(length):
            seen = range(i + 1) if causal else range(length)
            rows = [max(-clip, min(clip, j - i)) + clip for j in seen]
            scores = [q[0, h, i] @ (k[0, h, j] + keys[row]) / math.sqrt(width) for j, row in zip(seen, rows)]
            weights = torch.stack(scores).softmax(0)
            expected = sum(w * (v[0, h, j] + values[row]) for w, j, row in zip(weights, seen, rows))
            torch.testing.assert_close(y[0, h, i], expected, atol=1e-12, rtol=0)


def test_buckets_of_the_paper() -> None:
    past = T5BiasPosition(1, direction="past").bucket_index(-torch.tensor([0, 1, 15, 16, 18, 19, 112, 113, 10_000]))
    assert past.tolist() == [0, 1, 15, 16, 16, 17, 30, 31, 31]
    both = T5BiasPosition(1).bucket_index(torch.tensor([0, -1, 1, -7, 7, -8, 8, -1000, 1000]))
    assert both.tolist() == [0, 1, 17, 7, 23, 8, 24, 15, 31]
    assert (T5BiasPosition(1, direction="past").bucket_index(torch.arange(1, 9)) == 0).all()


def test_bucket_edges_are_the_logarithms_where_those_are_certain() -> None:
    for buckets, far in ((32, 128), (16, 128), (8, 20), (64, 1000)):
        exact = buckets // 2
        edges = bucket_edges(buckets, far)
        assert len(edges) == buckets - 1
        for n in range(exact, 2 * far):
            spot = math.log(n / exact) / math.log(far / exact) * (buckets - exact)
            if abs(spot - round(spot)) > 1e-9:
                assert sum(edge <= n for edge in edges) == min(exact + int(spot), buckets - 1)


POSITIONS = {
    "alibi": lambda: AlibiPosition(3),
    "t5": lambda: T5BiasPosition(3, buckets=8, max_distance=9),
    "t5 past": lambda: T5BiasPosition(3, buckets=8, max_distance=9, direction="past"),
    "kerple": lambda: KerplePosition(3),
    "kerple power": lambda: KerplePosition(3, "power"),
    "shaw": lambda: ShawPosition(4, 3),
    "shaw past": lambda: ShawPosition(4, 3, heads=3, direction="past"),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_what_it_says_by_distance_is_what_it_does(name: str) -> None:
    position, length = POSITIONS[name](), 12
    place = segment_positions([[0] * length])
    actual = position.distance_terms(length - 1, length - 1)
    assert actual is not None
    ahead = torch.arange(length) - torch.arange(length)[:, None]
    rows = ahead.clamp(-actual.lookback, actual.lookahead) + actual.lookback
    q, k = torch.randn(2, 1, 3, length, 4)
    terms = torch.zeros(1, 3, length, length)
    if actual.bias is not None:
        terms = terms + actual.bias[None, :, rows]
    if actual.keys is not None:
        terms = terms + torch.einsum("bhle,hlse->bhls", q, actual.keys.expand(3, -1, -1)[:, rows])
    torch.testing.assert_close(position.score(torch.zeros_like(terms), q, k, place, place), terms)
    weights, y = torch.rand(1, 3, length, length), torch.zeros(1, 3, length, 4)
    values = 0.0 if actual.values is None else actual.values.expand(3, -1, -1)[:, rows]
    torch.testing.assert_close(position.value(y, weights, place, place), (weights[..., None] * values).sum(-2) + y)


@pytest.mark.parametrize("name", POSITIONS)
def test_padding_and_packing_change_no_distance(name: str) -> None:
    position = POSITIONS[name]()
    q, k = torch.randn(2, 1, 3, 8, 4)
    alone, packed = segment_positions([[0] * 5]), segment_positions([[PADDING_SEGMENT, 3, 3] + [4] * 5])
    logits = torch.zeros(1, 3, 8, 8)
    expected = position.score(logits[..., 3:, 3:], q[:, :, 3:], k[:, :, 3:], alone, alone)
    torch.testing.assert_close(position.score(logits, q, k, packed, packed)[..., 3:, 3:], expected)


@pytest.mark.usefixtures("unchecked")
def test_sizes_and_directions_without_distances_are_refused() -> None:
    with pytest.raises(ValueError, match=r"heads \(0\) must be at least 1"):
        AlibiPosition(0)
    with pytest.raises(ValueError, match=r"clip \(0\) must be at least 1"):
        ShawPosition(4, 0)
    with pytest.raises(ValueError, match=r"buckets \(6\) must be a multiple of 4"):
        T5BiasPosition(2, buckets=6)
    with pytest.raises(ValueError, match=r"max_distance \(16\) must be above 16"):
        T5BiasPosition(2, max_distance=16, direction="past")
    with pytest.raises(ValueError, match="direction 'left' must be one of past, both"):
        ShawPosition(4, 2, direction="left")  # type: ignore[arg-type]
