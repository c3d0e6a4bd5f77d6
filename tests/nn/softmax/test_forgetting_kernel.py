"""Attention with forget gates: products of gates pair by pair, ALiBi, long rows in float32, packing and steps."""

import math

import pytest
import torch
from torch import Tensor

from manyformer.nn import Attention, ForgettingKernel, KernelCall, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, Context, TokenPositions
from manyformer.nn.masks import Causal
from manyformer.nn.positions import AlibiPosition, NoPosition
from manyformer.nn.softmax import forgetting_kernel
from token_rows import range_positions, segment_positions

HEADS, GROUPS, WIDTH = 4, 2, 6


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting_kernel, "BLOCK", 4)


def kernel(path: str = "auto") -> ForgettingKernel:
    return ForgettingKernel(8, GROUPS, path=path)  # type: ignore[arg-type]


def attend(
    path: str, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, positions: TokenPositions, past: int = 0
) -> Tensor:
    queries = positions.columns(past, positions.position_ids.shape[1]) if past else positions
    values = torch.cat([v, gates[..., None]], -1)
    return kernel(path)(KernelCall(q, k, values, queries, positions, NoPosition())).y


def draw(rows: int, length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    heads = (HEADS, GROUPS, GROUPS)
    qkv = [torch.randn(rows, n, length, WIDTH, dtype=dtype, requires_grad=True) for n in heads]
    return [*qkv, torch.randn(rows, GROUPS, length, dtype=dtype, requires_grad=True)]


def by_hand(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """One document, (h, l, e) each: exp(q k / sqrt(e)) times the product of the gates after the key."""
    rows = []
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        for i in range(q.shape[1]):
            products = [torch.sigmoid(gates[group, j + 1 : i + 1]).prod() for j in range(i + 1)]
            scores = [(q[head, i] @ k[group, j] / math.sqrt(WIDTH)).exp() for j in range(i + 1)]
            weights = torch.stack(products) * torch.stack(scores)
            rows.append(weights @ v[group, : i + 1] / weights.sum())
    return torch.stack(rows).view(HEADS, q.shape[1], -1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("path", ["naive", "fused"])
def test_it_is_the_product_of_gates_in_each_document(path: str) -> None:
    pad = PADDING_SEGMENT
    layouts = [[[0] * 11], [[pad, pad, 0, 0, 0, pad, 1, 1, 1, 1, pad]], [[0] * 5 + [1] * 2 + [2] * 4]]
    for segments in layouts:
        positions, inputs = segment_positions(segments), draw(1, 11)
        y = attend(path, *inputs, positions)
        documents = sorted(set(positions.segment_ids[0].tolist()) - {pad})
        columns = [(positions.segment_ids[0] == segment).nonzero()[:, 0] for segment in documents]
        actual = [y[0][:, index] for index in columns]
        expected = [by_hand(*(x[0][:, index] for x in inputs)) for index in columns]
        upstream = [torch.randn_like(x) for x in expected]
        results = [*actual, *torch.autograd.grad(actual, inputs, upstream)]
        wanted = [*expected, *torch.autograd.grad(expected, inputs, upstream)]
        assert all(gradient.abs().max() > 1e-3 for gradient in wanted[len(expected) :])
        torch.testing.assert_close(results, wanted, atol=1e-10, rtol=0)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("past", "new"), [(5, 1), (3, 9), (0, 12)])
def test_queries_at_the_end_of_a_cache(past: int, new: int) -> None:
    positions, (q, k, v, gates) = range_positions(past + new), draw(1, past + new)
    full = attend("naive", q, k, v, gates, positions)
    actual = attend("fused", q[:, :, past:], k, v, gates, positions, past)
    torch.testing.assert_close(actual, full[:, :, past:], atol=1e-12, rtol=0)


def test_constant_gates_are_alibi() -> None:
    q, k, v = torch.randn(3, 1, HEADS, 9, WIDTH, dtype=torch.float64)
    positions, alibi = range_positions(9), AlibiPosition(HEADS)
    forget = (-alibi.slopes.double()).exp()
    gates = torch.logit(forget)[None, :, None].expand(1, HEADS, 9)
    expected = SoftmaxKernel(Causal())(KernelCall(q, k, v, positions, positions, alibi)).y
    call = KernelCall(q, k, torch.cat([v, gates[..., None]], -1), positions, positions, NoPosition())
    torch.testing.assert_close(ForgettingKernel(8, HEADS)(call).y, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_sums_of_thousands_of_gates_lose_no_digits(dtype: torch.dtype, bound: float) -> None:
    """8,192 tokens whose logs of gates sum to thousands, where float32 resolves no more than 5e-4."""
    length, last = 8192, 200
    q, k, v, gates = (x.detach().to(dtype) for x in draw(1, length, torch.float32))
    positions = range_positions(length)
    assert torch.nn.functional.logsigmoid(gates.float()).sum(-1).max() < -5000
    for stop in (last, length // 2 + 5, length):
        q, inputs = q[:, :, :last], (x[:, :, :stop] for x in (k, v, gates))
        row = positions.columns(0, stop)
        k_part, v_part, gate_part = inputs
        actual = attend("fused", q, k_part, v_part, gate_part, row, stop - last)
        expected = attend("naive", *(x.double() for x in (q, k_part, v_part, gate_part)), row, stop - last)
        assert (actual.double() - expected).abs().max() < bound


@pytest.mark.parametrize("is_mixed", [True, False], ids=["a quarter forgets", "all forget"])
@pytest.mark.parametrize("nats", [0.05, 0.7, 3.0, 50.0, 1e3, 1e4])
def test_weak_gates_after_strong_ones_keep_their_digits(nats: float, is_mixed: bool) -> None:
    """Float32 against the definition in float64, with gradients: an origin for all 128 queries of a fused call left
    8e-4 of the largest at 1,000 nats, and 3e-6 at 0.7, where gates begin."""
    torch.manual_seed(0)
    exact, positions = draw(1, 300), range_positions(300)
    share = torch.rand(exact[3].shape, dtype=torch.float64)
    log_gates = -nats * torch.where(share < 0.25, 1.0, 0.01 / nats) if is_mixed else -nats * (0.5 + share)
    # the logit of a gate far below the smallest number is its logarithm
    exact[3] = (log_gates - torch.log(-torch.expm1(log_gates))).requires_grad_()
    narrow = [x.detach().float().requires_grad_() for x in exact]
    expected, y = attend("naive", *exact, positions), attend("fused", *narrow, positions)
    grad_output = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = [expected, *torch.autograd.grad((expected * grad_output).sum(), exact)]
    actual = [y, *torch.autograd.grad((y * grad_output.float()).sum(), narrow)]
    # where every token forgets the others, gradients of scores and gates are below what float32 resolves of weights
    counts = 5 if is_mixed or nats < 5 else 1
    for found, right in zip(actual[:counts], wanted):
        assert (found.double() - right).abs().max() / right.abs().max() < 5e-6


@pytest.mark.usefixtures("small_blocks")
def test_steps_equal_one_call_and_the_gate_gets_a_gradient() -> None:
    layer = Attention(8, HEADS, ForgettingKernel(8, GROUPS), kv_heads=GROUPS).double()
    x = torch.randn(1, 11, 8, dtype=torch.float64)
    full, pieces = layer(x, Context(range_positions(11))).y, []
    full.square().sum().backward()
    for parameter in layer.kernel.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 1e-4
    state = layer.init_state(1, device=x.device, dtype=x.dtype)
    for start, stop in ((0, 5), (5, 6), (6, 10), (10, 11)):
        y, state, _ = layer(x[:, start:stop], Context(range_positions(stop - start, start)), state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-12, rtol=0)


def test_it_says_what_it_does_and_refuses_what_it_cannot() -> None:
    q, k, v, gates = draw(1, 5)
    positions = range_positions(5)
    call = KernelCall(q, k, torch.cat([v, gates[..., None]], -1), positions, positions, NoPosition())
    assert kernel().explain(call).startswith("fused: blocks of 128 queries")
    weights: list[Tensor] = []
    watching = call._replace(watch=lambda module, name, value: weights.append(value))
    torch.testing.assert_close(kernel()(watching).y, kernel("naive")(call).y)
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(1, HEADS, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match="'fused' cannot serve this call: its weights are watched"):
        kernel("fused")(watching)
    with pytest.raises(ValueError, match="needs a key for each query, got 3 keys, 5 queries"):
        kernel()(call._replace(k=call.k[:, :, :3], v=call.v[:, :, :3], key_positions=range_positions(3)))
    with pytest.raises(ValueError, match="path 'slow' does not exist; choose from auto, naive, fused"):
        kernel("slow")
