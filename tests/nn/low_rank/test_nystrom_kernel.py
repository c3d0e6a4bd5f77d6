"""Nystroem attention: the class of transformers, the formula with an exact inverse, documents and independent rows."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, TokenPositions
from manyformer.nn.low_rank.nystrom_kernel import NystromKernel, iterative_pseudoinverse
from manyformer.nn.positions import NoPosition
from token_rows import range_positions, segment_positions

HEADS, WIDTH = 2, 6


def draw(rows: int, length: int, heads: int = HEADS) -> list[Tensor]:
    return list(torch.randn(3, rows, heads, length, WIDTH, dtype=torch.float64))


def attend(kernel: NystromKernel, qkv: list[Tensor], positions: TokenPositions) -> Tensor:
    q, k, v = qkv
    return kernel(KernelCall(q, k, v, positions, positions, NoPosition())).y


def by_hand(kernel: NystromKernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One document and head, (l, e) each, with the exact inverse."""
    length, m = len(q), kernel.landmarks
    runs = [[t for t in range(length) if t * m // length == n] for n in range(m)]
    q_means, k_means = (torch.stack([x[run].mean(0) for run in runs]) for x in (q, k))
    outer, middle, inner = (
        (a @ b.T / math.sqrt(WIDTH)).softmax(-1) for a, b in ((q, k_means), (q_means, k_means), (q_means, k))
    )
    return outer @ torch.linalg.pinv(middle) @ inner @ v


@pytest.mark.parametrize("length", [12, 13, 17])
def test_it_is_the_formula_with_gradients(length: int) -> None:
    kernel = NystromKernel(HEADS, 5, iterations=40, convolution=3).double()
    qkv = [x.requires_grad_() for x in draw(1, length)]
    y = attend(kernel, qkv, range_positions(length))
    assert kernel.weight is not None
    rows = []
    for head in range(HEADS):
        padded = F.pad(qkv[2][0, head], (0, 0, 1, 1))
        mixed = sum(kernel.weight[head, n] * padded[n : n + length] for n in range(3))
        rows.append(by_hand(kernel, *(x[0, head] for x in qkv)) + mixed)
    expected, upstream, leaves = torch.stack(rows)[None], torch.randn_like(y), [*qkv, kernel.weight]
    gradients = (torch.autograd.grad(z, leaves, upstream) for z in (y, expected))
    torch.testing.assert_close(y, expected, atol=1e-7, rtol=0)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_it_is_the_layer_of_transformers_for_one_row_and_head() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    sizes = {"hidden_size": WIDTH, "num_attention_heads": 1, "num_landmarks": 8, "segment_means_seq_len": 48}
    config = transformers.NystromformerConfig(**sizes, conv_kernel_size=5, attention_probs_dropout_prob=0.0)
    reference = NystromformerSelfAttention(config).double().eval()
    kernel, x = NystromKernel(1, 8, convolution=5).double(), torch.randn(1, 48, WIDTH, dtype=torch.float64)
    assert kernel.weight is not None
    with torch.no_grad():
        kernel.weight.copy_(reference.conv.weight[:, 0, :, 0])
        qkv = [layer(x)[:, None] for layer in (reference.query, reference.key, reference.value)]
        actual = attend(kernel, qkv, range_positions(48))[:, 0]
        torch.testing.assert_close(actual, reference(x)[0], atol=1e-10, rtol=0)


def test_short_documents_have_plain_attention() -> None:
    qkv, positions = draw(2, 8), segment_positions([[0] * 8] * 2)
    q, k, v = qkv
    expected = SoftmaxKernel()(KernelCall(q, k, v, positions, positions, NoPosition())).y
    actual = attend(NystromKernel(HEADS, 8, convolution=None), qkv, positions)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


def test_documents_in_packed_and_padded_rows_are_those_alone() -> None:
    pad, kernel = PADDING_SEGMENT, NystromKernel(HEADS, 4, convolution=3).double()
    positions = segment_positions([[0] * 3 + [1] * 9 + [2] * 6, [pad] * 4 + [0] * 11 + [pad] * 3])
    qkv = draw(2, 18)
    y = attend(kernel, qkv, positions)
    for row, segment in ((0, 0), (0, 1), (0, 2), (1, 0)):
        columns = (positions.segment_ids[row] == segment).nonzero()[:, 0]
        alone = attend(kernel, [x[row : row + 1, :, columns] for x in qkv], range_positions(len(columns)))
        torch.testing.assert_close(y[row, :, columns], alone[0], atol=1e-12, rtol=0)


def test_a_loud_row_changes_no_other() -> None:
    """In the class of transformers it does: its inverse starts from one maximum of the batch."""
    kernel, qkv = NystromKernel(HEADS, 4).double(), draw(2, 16)
    y = attend(kernel, qkv, segment_positions([[0] * 16] * 2))
    loud = [torch.stack([x[0], 30 * x[1]]) for x in qkv]
    torch.testing.assert_close(attend(kernel, loud, segment_positions([[0] * 16] * 2))[0], y[0], atol=1e-12, rtol=0)


def test_the_inverse_improves_with_its_steps() -> None:
    matrices = torch.randn(20, 16, 16, dtype=torch.float64).softmax(-1)
    errors = []
    for steps in (6, 20):
        inverse = iterative_pseudoinverse(matrices, steps)
        errors.append((matrices @ inverse @ matrices - matrices).abs().max().item())
    assert errors[0] > 1e-4
    assert errors[1] < 1e-10


def test_no_landmarks_even_convolutions_and_keys_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"landmarks \(0\) and iterations \(6\) must be at least 1"):
        NystromKernel(2, 0)
    with pytest.raises(ValueError, match=r"convolution \(4\) must be an odd number"):
        NystromKernel(2, convolution=4)
    (q, _, _), (_, k, v) = draw(1, 5), draw(1, 9)
    with pytest.raises(ValueError, match="queries and keys of the same tokens, got 5, 9"):
        NystromKernel(2)(KernelCall(q, k, v, range_positions(5), range_positions(9), NoPosition()))
