"""MoBA: the choice in plain loops, blocks against masks with gradients, identities, packing, steps and its growth."""

import math

import pytest
import torch
from torch import Tensor

from manyformer.nn import Attention, KernelCall, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, Context, TokenPositions
from manyformer.nn.masks import Causal
from manyformer.nn.positions import NoPosition, RotaryPosition
from manyformer.nn.runtime.costs import count_flops
from manyformer.nn.sparse.moba_kernel import MoBAKernel
from token_rows import range_positions, segment_positions

HEADS, GROUPS, WIDTH, BLOCK = 4, 2, 6, 3
LAYOUTS = {
    "plain": [[0] * 17] * 2,
    "packed": [[0] * 8 + [1] * 9, [0] * 2 + [1] * 12 + [PADDING_SEGMENT] * 3],
    "left padding": [[PADDING_SEGMENT] * 4 + [0] * 13, [0] * 17],
}


def draw(rows: int, length: int) -> list[Tensor]:
    heads = (HEADS, GROUPS, GROUPS)
    return [torch.randn(rows, n, length, WIDTH, dtype=torch.float64, requires_grad=True) for n in heads]


def call_of(qkv: list[Tensor], positions: TokenPositions, past: int = 0) -> KernelCall:
    queries = positions.columns(past, positions.position_ids.shape[1]) if past else positions
    return KernelCall(qkv[0][:, :, past:], qkv[1], qkv[2], queries, positions, NoPosition())


def seen_by_hand(q: Tensor, k: Tensor, count: int) -> Tensor:
    """One document and head, (l, e) each: the mask of visible keys."""
    length = len(q)
    mask = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        own = i // BLOCK
        scores = [(float(q[i] @ k[c * BLOCK : (c + 1) * BLOCK].mean(0)), c) for c in range(own)]
        for c in [own, *(c for _, c in sorted(scores, reverse=True)[: count - 1])]:
            mask[i, c * BLOCK : min((c + 1) * BLOCK, i + 1)] = True
    return mask


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_choice_is_that_of_the_loops_in_each_document(layout: str, count: int) -> None:
    positions = segment_positions(LAYOUTS[layout])
    qkv = [x.detach() for x in draw(2, 17)]
    mask = MoBAKernel(BLOCK, count).visible(call_of(qkv, positions))
    expected = torch.zeros_like(mask)
    for row, ids in enumerate(positions.segment_ids):
        for segment in set(ids.tolist()) - {PADDING_SEGMENT}:
            columns = (ids == segment).nonzero()[:, 0]
            for head in range(HEADS):
                q, k = qkv[0][row, head, columns], qkv[1][row, head * GROUPS // HEADS, columns]
                expected[row, head, columns[:, None], columns] = seen_by_hand(q, k, count)
    real = positions.segment_ids != PADDING_SEGMENT
    assert torch.equal(mask & real[:, None, :, None], expected)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_equal_the_mask_with_gradients(layout: str, count: int) -> None:
    positions, qkv = segment_positions(LAYOUTS[layout]), draw(2, 17)
    real = (positions.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    upstream = torch.randn(2, HEADS, 17, WIDTH, dtype=torch.float64) * real
    results = []
    for path in ("naive", "blocks"):
        y = MoBAKernel(BLOCK, count, path=path)(call_of(qkv, positions)).y  # type: ignore[arg-type]
        results.append([y * real, *torch.autograd.grad(y, qkv, upstream)])
    torch.testing.assert_close(results[1], results[0], atol=1e-12, rtol=0)


def test_as_many_blocks_as_there_are_is_full_attention() -> None:
    positions, qkv = range_positions(17), draw(1, 17)
    expected = SoftmaxKernel(Causal())(call_of(qkv, positions)).y
    for path in ("naive", "blocks"):
        actual = MoBAKernel(BLOCK, 6, path=path)(call_of(qkv, positions)).y  # type: ignore[arg-type]
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    assert (MoBAKernel(BLOCK, 5)(call_of(qkv, positions)).y - expected).abs().max() > 1e-3


def test_of_equal_blocks_the_newer_is_chosen() -> None:
    q, k, v = torch.ones(3, 1, 1, 12, WIDTH, dtype=torch.float64)
    mask = MoBAKernel(BLOCK, 2).visible(call_of([q, k, v], range_positions(12)))
    assert mask[0, 0, 11].nonzero()[:, 0].tolist() == [6, 7, 8, 9, 10, 11]


def test_steps_equal_one_call() -> None:
    layer = Attention(8, 2, MoBAKernel(BLOCK, 2), position=RotaryPosition(4)).double()
    x, pieces = torch.randn(1, 17, 8, dtype=torch.float64), []
    full, state = layer(x, Context(range_positions(17))).y, layer.init_state(1, device=x.device, dtype=x.dtype)
    for start, stop in ((0, 5), (5, 6), (6, 14), (14, 17)):
        y, state, _ = layer(x[:, start:stop], Context(range_positions(stop - start, start)), state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-12, rtol=0)


def test_a_key_planted_in_a_far_block_is_seen() -> None:
    """One key of a block points where the query does; its mean stands out by signal / block against 1 / sqrt(block)."""
    torch.manual_seed(0)
    block, length, hits = 16, 256, 0
    for trial in range(20):
        k = torch.randn(1, 1, length, 32)
        q = torch.randn(1, 1, length, 32)
        planted = 7 + trial * 11
        k[0, 0, planted] = q[0, 0, -1] * 3 * math.sqrt(block)
        mask = MoBAKernel(block, 2).visible(call_of([q, k, k], range_positions(length)))
        hits += int(mask[0, 0, -1, planted])
    assert hits == 20


def test_work_grows_linearly_with_the_length() -> None:
    flops = []
    for length in (1024, 2048, 4096):
        q, k, v = torch.randn(3, 1, 1, length, 32)
        call, kernel = call_of([q, k, v], range_positions(length)), MoBAKernel(64, 3)
        flops.append(count_flops(lambda kernel=kernel, call=call: kernel(call)))  # type: ignore[misc]
    assert math.log(flops[-1] / flops[0]) / math.log(4) < 1.3
    assert flops[-1] < count_flops(lambda: SoftmaxKernel(Causal())(call)) / 4


def test_an_empty_block_an_unknown_path_and_blocks_of_cut_documents_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block \(0\) and count \(3\) must be at least 1"):
        MoBAKernel(0)
    with pytest.raises(ValueError, match="path 'fast' does not exist"):
        MoBAKernel(path="fast")  # type: ignore[arg-type]
    positions = range_positions(9)
    with pytest.raises(ValueError, match="path 'blocks' needs whole documents"):
        MoBAKernel(BLOCK, path="blocks")(call_of(draw(1, 9), positions, past=4))
