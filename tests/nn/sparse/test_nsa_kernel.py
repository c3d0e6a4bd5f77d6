"""Native Sparse Attention: plain loops over tokens with gradients, identities, packing, steps and its growth."""

import math

import pytest
import torch
from torch import Tensor

from manyformer.nn import Attention, KernelCall, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, Context, TokenPositions
from manyformer.nn.masks import Causal
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.runtime.costs import count_flops
from manyformer.nn.sparse.nsa_kernel import NSAKernel, NSASizes
from token_rows import range_positions, segment_positions

HEADS, GROUPS, WIDTH = 4, 2, 6
SIZES = NSASizes(compressed_length=4, stride=2, block=4, blocks_seen=4, window=3)
LAYOUTS = {
    "plain": [[0] * 23],
    "packed": [[0] * 2 + [1] * 20 + [PADDING_SEGMENT]],
    "left padding": [[PADDING_SEGMENT] * 3 + [0] * 20],
}


def make_kernel(sizes: NSASizes = SIZES, path: str = "auto") -> NSAKernel:
    torch.manual_seed(0)
    return NSAKernel(8, GROUPS, WIDTH, sizes, path=path).double()  # type: ignore[arg-type]


def draw(length: int) -> list[Tensor]:
    widths = {HEADS: [WIDTH + 3], GROUPS: [WIDTH, 5 * WIDTH]}
    return [
        torch.randn(1, n, length, width, dtype=torch.float64, requires_grad=True)
        for n, each in widths.items()
        for width in each
    ]


def call_of(qkv: list[Tensor], positions: TokenPositions) -> KernelCall:
    return KernelCall(*qkv, positions, positions, RotaryPosition(WIDTH))


def softmax_over(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    weights = (torch.stack(keys) @ q / math.sqrt(WIDTH)).softmax(0)
    return weights @ torch.stack(values), weights


def written_out(kernel: NSAKernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One document, (h, l, e + 3), (g, l, e) and (g, l, 5 e): the formulas, token by token."""
    length, position = q.shape[1], RotaryPosition(WIDTH)
    outputs = torch.zeros(HEADS, length, WIDTH, dtype=q.dtype)
    for group in range(GROUPS):
        near_v, low_k, low_v, far_k, far_v = v[group].split(WIDTH, -1)
        far_k = position.key(far_k[None, None], range_positions(length))[0, 0]
        heads = range(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS)
        for i in range(length):
            starts = [c for c in range(0, length, 2) if c + 3 <= i]
            keys, values = [], []
            for c in starts:
                key = kernel.compress_keys(low_k[None, None, None, c : c + 4])
                keys.append(position.key(key, range_positions(1, c + 3, plain=False))[0, 0, 0])
                values.append(kernel.compress_values(low_v[None, None, None, c : c + 4])[0, 0, 0])
            importance = [0.0] * 6
            for head in heads:
                gates = q[head, i, WIDTH:].sigmoid()
                if starts:
                    y, weights = softmax_over(q[head, i, :WIDTH], keys, values)
                    outputs[head, i] = outputs[head, i] + gates[0] * y
                    for c, weight in zip(starts, weights.tolist()):
                        for stride in (c // 2, c // 2 + 1):
                            importance[stride // 2] += weight
                window = range(max(0, i - 2), i + 1)
                y, _ = softmax_over(q[head, i, :WIDTH], [k[group, j] for j in window], [near_v[j] for j in window])
                outputs[head, i] = outputs[head, i] + gates[2] * y
            own = i // 4
            others = sorted((c for c in range(1, own - 1)), key=lambda c: (importance[c], c), reverse=True)
            blocks = {own, max(own - 1, 0), 0, *others[: 4 - len({own, max(own - 1, 0), 0})]}
            tokens = [j for j in range(i + 1) if j // 4 in blocks]
            for head in heads:
                y, _ = softmax_over(q[head, i, :WIDTH], [far_k[j] for j in tokens], [far_v[j] for j in tokens])
                outputs[head, i] = outputs[head, i] + q[head, i, WIDTH + 1].sigmoid() * y
    return outputs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_paths_equal_the_formulas_with_gradients(layout: str) -> None:
    positions, qkv = segment_positions(LAYOUTS[layout]), draw(23)
    real = (positions.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    upstream = torch.randn(1, HEADS, 23, WIDTH, dtype=torch.float64) * real
    kernel = make_kernel()
    expected = torch.zeros_like(upstream)
    for row, ids in enumerate(positions.segment_ids):
        for segment in set(ids.tolist()) - {PADDING_SEGMENT}:
            columns = (ids == segment).nonzero()[:, 0]
            expected[row, :, columns] = written_out(kernel, *(x[row, :, columns] for x in qkv))
    weights = [*qkv, *kernel.compress_keys.parameters(), *kernel.compress_values.parameters()]
    grads = torch.autograd.grad(expected, weights, upstream, retain_graph=True)
    for path in ("naive", "blocks"):
        kernel.path = path  # type: ignore[assignment]
        y = kernel(call_of(qkv, positions)).y
        torch.testing.assert_close(y * real, expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(torch.autograd.grad(y, weights, upstream), grads, atol=1e-11, rtol=0)


@pytest.mark.parametrize(("branch", "part"), [(1, slice(3, 5)), (2, slice(0, 1))])
def test_a_branch_that_sees_all_is_full_attention(branch: int, part: slice) -> None:
    q, k, v = (x.detach() for x in draw(23))
    q[..., WIDTH:], q[..., WIDTH + branch] = -50.0, 50.0
    kernel, positions = make_kernel(SIZES._replace(window=23, blocks_seen=6)), range_positions(23)
    sets = v.split(WIDTH, -1)
    keys = k if branch == 2 else RotaryPosition(WIDTH).key(sets[3], positions)
    call = KernelCall(q[..., :WIDTH], keys, sets[part][-1], positions, positions, RotaryPosition(WIDTH))
    expected = SoftmaxKernel(Causal())(call).y
    torch.testing.assert_close(kernel(call_of([q, k, v], positions)).y, expected, atol=1e-12, rtol=0)


def test_importance_counts_the_strides_that_blocks_share() -> None:
    """With the lengths of the paper, a block gets 1, 2, 2, 2, 1 times the weights of the five that overlap it."""
    kernel = NSAKernel(8, 1, WIDTH)
    importance = kernel.importance(torch.eye(11)[None, None], 192)[0, 0]
    assert importance[:, 1].tolist() == [0, 0, 0, 1, 2, 2, 2, 1, 0, 0, 0]
    assert importance[:, 0].tolist() == [2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("sizes", [(1,) * 23, (5, 1, 8, 9)])
def test_steps_equal_one_call(sizes: tuple[int, ...]) -> None:
    kernel = NSAKernel(8, 1, 4, SIZES)
    layer = Attention(8, 2, kernel, kv_heads=1, position=RotaryPosition(4)).double()
    x, pieces, start = torch.randn(1, 23, 8, dtype=torch.float64), [], 0
    full, state = layer(x, Context(range_positions(23))).y, layer.init_state(1, device=x.device, dtype=x.dtype)
    for size in sizes:
        y, state, _ = layer(x[:, start : start + size], Context(range_positions(size, start)), state)
        pieces.append(y)
        start += size
    torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-12, rtol=0)
    assert state.kernel.k.shape[2] == 10


def test_work_grows_less_than_with_full_attention() -> None:
    flops = []
    kernel = NSAKernel(8, 1, 16, NSASizes(window=64, blocks_seen=3))
    for length in (512, 2048):
        q, k, v = torch.randn(1, 1, length, 19), torch.randn(1, 1, length, 16), torch.randn(1, 1, length, 80)
        call = KernelCall(q, k, v, range_positions(length), range_positions(length), RotaryPosition(16))
        flops.append(count_flops(lambda call=call: kernel(call)))  # type: ignore[misc]
    assert math.log(flops[1] / flops[0]) / math.log(4) < 1.4
    plain = call._replace(q=q[..., :16], v=v[..., :16])
    assert flops[1] < count_flops(lambda: SoftmaxKernel(Causal())(plain)) / 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (SIZES._replace(stride=3), r"compressed_length \(4\) and block \(4\) must be multiples of stride \(3\)"),
        (SIZES._replace(blocks_seen=2), r"blocks_seen \(2\) must be at least 3"),
    ],
)
def test_blocks_that_the_stride_does_not_divide_and_too_few_of_them_are_refused(sizes: NSASizes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NSAKernel(8, 1, WIDTH, sizes)
