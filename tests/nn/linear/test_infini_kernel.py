"""Infini-attention: the formulas token by token with gradients, linear attention over earlier segments, and steps."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from manyformer.models.embedding import empty_tail, materialize_tail, positions_of
from manyformer.nn import Attention, KernelCall
from manyformer.nn.core import PADDING_SEGMENT, Context, TokenPositions, contiguous_positions
from manyformer.nn.decoding.bound_step import bind_step
from manyformer.nn.linear.infini_kernel import InfiniKernel
from manyformer.nn.positions import NoPosition, RotaryPosition
from token_rows import range_positions, segment_positions

HEADS, GROUPS, WIDTH, SEGMENT = 4, 2, 6, 4
LAYOUTS = {
    "plain": [[0] * 15],
    "packed": [[0] * 2 + [1] * 12 + [PADDING_SEGMENT], [0] * 9 + [1] * 6],
    "padding": [[PADDING_SEGMENT] * 3 + [0] * 5 + [PADDING_SEGMENT] * 2 + [0] * 5],
}


def make_kernel(update: str) -> InfiniKernel:
    torch.manual_seed(0)
    kernel = InfiniKernel(HEADS, SEGMENT, update=update, position=RotaryPosition(WIDTH)).double()  # type: ignore[arg-type]
    torch.nn.init.normal_(kernel.beta)
    return kernel


def draw(rows: int, length: int) -> list[Tensor]:
    heads = (HEADS, GROUPS, GROUPS)
    return [torch.randn(rows, n, length, WIDTH, dtype=torch.float64, requires_grad=True) for n in heads]


def call_of(qkv: list[Tensor], positions: TokenPositions) -> KernelCall:
    return KernelCall(*qkv, positions, positions, NoPosition())


def written_out(kernel: InfiniKernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One document and head, (l, e) each, without the gate: what the memory and the segment return, side by side."""
    matrix, normalizer, outputs = q.new_zeros(WIDTH, WIDTH), q.new_zeros(WIDTH), []
    turned_q, turned_k = (RotaryPosition(WIDTH).query(x[None, None], range_positions(len(x)))[0, 0] for x in (q, k))
    for i in range(len(q)):
        start = i // SEGMENT * SEGMENT
        features = F.elu(q[i]) + 1
        far = features @ matrix / (features @ normalizer) if start else q.new_zeros(WIDTH)
        near = (turned_k[start : i + 1] @ turned_q[i] / math.sqrt(WIDTH)).softmax(0) @ v[start : i + 1]
        outputs.append(torch.cat([far, near]))
        if i % SEGMENT == SEGMENT - 1:
            features = F.elu(k[start : i + 1]) + 1
            values = v[start : i + 1]
            if kernel.update == "delta" and start:
                values = values - features @ matrix / (features @ normalizer)[:, None]
            matrix, normalizer = matrix + features.T @ values, normalizer + features.sum(0)
    return torch.stack(outputs)


@pytest.mark.parametrize("update", ["sum", "delta"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_segments_equal_the_formulas_with_gradients(layout: str, update: str) -> None:
    positions, kernel = segment_positions(LAYOUTS[layout]), make_kernel(update)
    qkv = draw(len(LAYOUTS[layout]), 15)
    real = (positions.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    expected = torch.zeros_like(qkv[0])
    for row, ids in enumerate(positions.segment_ids):
        for segment in set(ids.tolist()) - {PADDING_SEGMENT}:
            columns = (ids == segment).nonzero()[:, 0]
            for head in range(HEADS):
                q, (k, v) = qkv[0][row, head, columns], (x[row, head * GROUPS // HEADS, columns] for x in qkv[1:])
                far, near = written_out(kernel, q, k, v).split(WIDTH, -1)
                share = kernel.beta[head].sigmoid()
                expected[row, head, columns] = share * far + (1 - share) * near
    upstream, weights = torch.randn_like(expected) * real, [*qkv, kernel.beta]
    y = kernel(call_of(qkv, positions)).y
    torch.testing.assert_close(y * real, expected * real, atol=1e-12, rtol=0)
    grads = [torch.autograd.grad(x, weights, upstream) for x in (y, expected)]
    torch.testing.assert_close(*grads, atol=1e-11, rtol=0)


@pytest.mark.parametrize("segment", [15, 16, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_within_one_segment_only_softmax_attention_counts(layout: str, segment: int) -> None:
    positions = segment_positions(LAYOUTS[layout])
    kernel = InfiniKernel(HEADS, segment, position=RotaryPosition(WIDTH)).double()
    q, k, v = (x.detach() for x in draw(len(LAYOUTS[layout]), 15))
    ids = positions.segment_ids
    mask = (ids[:, None] == ids[..., None]).tril()[:, None]
    turned_q, turned_k = RotaryPosition(WIDTH).query(q, positions), RotaryPosition(WIDTH).key(k, positions)
    expected = 0.5 * F.scaled_dot_product_attention(turned_q, turned_k, v, mask, enable_gqa=True)
    real = (ids != PADDING_SEGMENT)[:, None, :, None]
    torch.testing.assert_close(kernel(call_of([q, k, v], positions)).y * real, expected * real, atol=1e-12, rtol=0)


@pytest.mark.parametrize("update", ["sum", "delta"])
def test_steps_of_one_token_equal_one_pass(update: str) -> None:
    kernel = InfiniKernel(4, SEGMENT, update=update, position=RotaryPosition(4))  # type: ignore[arg-type]
    torch.nn.init.normal_(kernel.beta)
    layer = Attention(16, 4, kernel, kv_heads=2).double()
    x, device = torch.randn(2, 15, 16, dtype=torch.float64), torch.device("cpu")
    step = bind_step(layer)
    full = layer(x, Context(contiguous_positions(2, 0, 15, device))).y
    _, state, _ = layer(
        x[:, :2], Context(contiguous_positions(2, 0, 2, device)), layer.init_state(2, device=device, dtype=x.dtype)
    )
    for i in range(2, 15):
        y, state = step(x[:, i : i + 1], Context(contiguous_positions(2, i, i + 1, device)), state)
        torch.testing.assert_close(y, full[:, i : i + 1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("sizes", [(1,) * 15, (3, 8, 4)])
def test_a_state_of_constant_size_continues_documents(sizes: tuple[int, ...]) -> None:
    layer = Attention(8, 2, InfiniKernel(2, SEGMENT, position=RotaryPosition(4))).double()
    segments = torch.tensor(LAYOUTS["packed"])
    x, parts, start = torch.randn(2, 15, 8, dtype=torch.float64), [], 0
    full = layer(x, Context(positions_of(segments, segments, None)[0])).y
    state, tail = layer.init_state(2, device=x.device, dtype=x.dtype), materialize_tail(empty_tail(2, x.device))
    for size in sizes:
        columns = slice(start, start + size)
        positions, tail = positions_of(segments[:, columns], segments[:, columns], tail)
        y, state, _ = layer(x[:, columns], Context(positions), state)
        parts.append(y)
        start += size
    valid = (segments != PADDING_SEGMENT)[..., None]
    torch.testing.assert_close(torch.cat(parts, 1) * valid, full * valid, atol=1e-12, rtol=0)
    assert state.kernel.k.shape == (2, 2, SEGMENT, 4)


def test_an_empty_segment_and_an_unknown_update_are_refused() -> None:
    with pytest.raises(ValueError, match=r"segment \(0\) must be at least 1 token"):
        InfiniKernel(2, 0)
    with pytest.raises(ValueError, match=r"update \('gated'\) must be sum or delta"):
        InfiniKernel(2, 4, update="gated")  # type: ignore[arg-type]
