"""PaTH attention: products of reflections pair by pair with gradients, documents, steps, and long rows in float32."""

import math

import pytest
import torch
from torch import Tensor

from manyformer.nn import Attention, KernelCall, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, Context, TokenPositions
from manyformer.nn.masks import Causal
from manyformer.nn.positions import NoPosition
from manyformer.nn.softmax.path_kernel import PaTHKernel
from token_rows import range_positions, segment_positions

HEADS, GROUPS, WIDTH = 4, 2, 6


def draw(rows: int, length: int) -> list[Tensor]:
    """Queries, keys, values with directions and strengths."""
    heads = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, 3 + WIDTH + 1))
    return [torch.randn(rows, n, length, width, dtype=torch.float64, requires_grad=True) for n, width in heads]


def attend(qkv: list[Tensor], positions: TokenPositions, chunk: int = 4) -> Tensor:
    q, k, v = qkv
    return PaTHKernel(8, GROUPS, WIDTH, chunk=chunk)(KernelCall(q, k, v, positions, positions, NoPosition())).y


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One document, (h, l, e) each."""
    rows, identity = [], torch.eye(WIDTH, dtype=q.dtype)
    for head in range(HEADS):
        keys, (values, w, strength) = k[head * GROUPS // HEADS], v[head * GROUPS // HEADS].split([3, WIDTH, 1], -1)
        w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        reflections = [identity - 2 * torch.sigmoid(b) * torch.outer(x, x) for b, x in zip(strength, w)]
        for i in range(q.shape[1]):
            row, scores = q[head, i], []
            for j in range(i, -1, -1):
                scores.append(row @ keys[j] / math.sqrt(WIDTH))
                row = row @ reflections[j]
            rows.append(torch.stack(scores[::-1]).softmax(0) @ values[: i + 1])
    return torch.stack(rows).view(HEADS, q.shape[1], -1)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_it_is_the_product_of_reflections_in_each_document(chunk: int) -> None:
    pad = PADDING_SEGMENT
    for segments in ([[0] * 11], [[pad, pad, 0, 0, 0, pad, 1, 1, 1, 1, pad]], [[0] * 5 + [1] * 2 + [2] * 4]):
        positions, inputs = segment_positions(segments), draw(1, 11)
        y = attend(inputs, positions, chunk)
        documents = sorted(set(positions.segment_ids[0].tolist()) - {pad})
        columns = [(positions.segment_ids[0] == segment).nonzero()[:, 0] for segment in documents]
        actual = [y[0][:, index] for index in columns]
        expected = [by_hand(*(x[0][:, index] for x in inputs)) for index in columns]
        upstream = [torch.randn_like(x) for x in expected]
        results = [*actual, *torch.autograd.grad(actual, inputs, upstream)]
        wanted = [*expected, *torch.autograd.grad(expected, inputs, upstream)]
        assert all(gradient.abs().max() > 1e-3 for gradient in wanted[len(expected) :])
        torch.testing.assert_close(results, wanted, atol=1e-11, rtol=0)


def test_without_strength_it_is_plain_attention() -> None:
    q, k, v = (x.detach() for x in draw(1, 9))
    v[..., -1] = -1e3
    positions = range_positions(9)
    expected = SoftmaxKernel(Causal())(KernelCall(q, k, v[..., :3], positions, positions, NoPosition())).y
    torch.testing.assert_close(attend([q, k, v], positions), expected, atol=1e-12, rtol=0)


def test_chunks_in_float32_equal_float64_over_a_long_row() -> None:
    inputs = [x.detach() for x in draw(1, 2048)]
    expected = attend(inputs, range_positions(2048), 64)
    actual = attend([x.float() for x in inputs], range_positions(2048), 64)
    assert (actual - expected).abs().max() < 1e-5


def test_steps_equal_one_call_and_reflections_get_gradients() -> None:
    kernel = PaTHKernel(8, GROUPS, 2, rank=3, chunk=4)
    layer = Attention(8, HEADS, kernel, kv_heads=GROUPS).double()
    positions = segment_positions([[0] * 11, [0] * 4 + [1] * 7])
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    full, pieces = layer(x, Context(positions)).y, []
    full.square().sum().backward()
    for parameter in kernel.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 1e-6
    state = layer.init_state(2, device=x.device, dtype=x.dtype)
    for start, stop in ((0, 5), (5, 6), (6, 10), (10, 11)):
        y, state, _ = layer(x[:, start:stop], Context(positions.columns(start, stop)), state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-12, rtol=0)


def test_rank_zero_and_queries_without_their_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank \(0\) and chunk \(64\) must be at least 1"):
        PaTHKernel(8, 2, 4, rank=0)
    (q, _, _), (_, k, v) = draw(1, 5), draw(1, 9)
    call = KernelCall(q, k, v, range_positions(5), range_positions(9), NoPosition())
    with pytest.raises(ValueError, match="needs a key for each query, got 9 keys, 5 queries"):
        PaTHKernel(8, GROUPS, WIDTH)(call)
