"""The kernel equals a loop over all pairs, and the recipe keeps its promises."""

import pytest
import torch
from manyformer_stick_breaking.kernel import StickBreakingKernel, stick_breaking_weights
from torch import Tensor

import manyformer as mf
from manyformer.nn.core import TokenPositions
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.positions import NoPosition


def loop_weights(scores: Tensor, visible: Tensor) -> Tensor:
    """The definition, one query and key at a time: from the last key to the first."""
    rows = []
    for row, row_visible in zip(scores.flatten(0, -2), visible.expand_as(scores).flatten(0, -2)):
        stick, weights = torch.ones((), dtype=scores.dtype), list[Tensor]()
        for score, is_visible in zip(row.flip(0), row_visible.flip(0)):
            share = torch.sigmoid(score) * is_visible
            weights.append(stick * share)
            stick = stick * (1 - share)
        rows.append(torch.stack(weights).flip(0))
    return torch.stack(rows).view_as(scores)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_weights_equal_a_loop_over_pairs(length: int) -> None:
    torch.manual_seed(0)
    scores = (3 * torch.randn(2, 2, length, length, dtype=torch.float64)).requires_grad_()
    visible = torch.ones(length, length, dtype=torch.bool).tril(-1)
    weight = torch.randn_like(scores)
    fast, slow = stick_breaking_weights(scores, visible), loop_weights(scores, visible)
    torch.testing.assert_close(fast, slow)
    gradients = [torch.autograd.grad((output * weight).sum(), scores)[0] for output in (fast, slow)]
    torch.testing.assert_close(*gradients)
    assert (fast[..., 0, :] == 0).all(), "the first token attends to nothing"
    assert (fast.sum(-1) <= 1).all()


def test_extreme_scores_have_finite_gradients() -> None:
    scores = torch.tensor([[[[0.0, 0.0, 0.0], [300.0, 0.0, 0.0], [-300.0, 300.0, 0.0]]]], requires_grad=True)
    weights = stick_breaking_weights(scores, torch.ones(3, 3, dtype=torch.bool).tril(-1))
    weights.sum().backward()
    assert weights[0, 0, 1].tolist() == [1.0, 0.0, 0.0]
    assert weights[0, 0, 2].tolist() == [0.0, 1.0, 0.0]
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_packed_documents_share_no_stick() -> None:
    kernel, heads = StickBreakingKernel(), torch.randn(1, 2, 6, 4)
    packed = TokenPositions(torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.tensor([[0, 0, 0, 1, 1, 1]]))
    outputs = kernel(KernelCall(heads, heads, heads, packed, packed, NoPosition())).y
    for part in (slice(0, 3), slice(3, 6)):
        x, positions = heads[:, :, part], TokenPositions(torch.arange(3)[None], torch.zeros(1, 3, dtype=torch.long))
        alone = kernel(KernelCall(x, x, x, positions, positions, NoPosition())).y
        torch.testing.assert_close(outputs[:, :, part], alone)


def test_every_promised_contract_holds() -> None:
    # a row reads all pairs of tokens one after the other, so short rows keep the test short
    report = mf.check("stick-breaking", length=64)
    assert report.ok, str(report)
    not_promised = {row.contract for row in report.rows if row.verdict == "not promised"}
    assert not_promised == {"source-padding"}, (
        "a language model has no source; decoding, packing and padding are promised"
    )
