"""The additive attention of `joeynmt`: same weights, same contexts, same gradients. Install it with --no-deps."""

import pytest
import torch
from torch import Tensor

from manyformer.nn.kernels.pairwise_kernel import AdditiveScore
from manyformer.nn.recurrent.gru_scan import StepAttention, gru_scan

pytestmark = pytest.mark.oracle

theirs_ = pytest.importorskip("joeynmt.attention", reason="pip install --no-deps joeynmt; its pins exclude other peers")

ROWS, SOURCE, DIM, MEMORY, ALIGN = 3, 7, 5, 8, 6


def test_the_look_is_that_of_joeynmt() -> None:
    reference = theirs_.BahdanauAttention(hidden_size=ALIGN, key_size=MEMORY, query_size=DIM).double()
    ours = AdditiveScore(DIM, ALIGN, key_dim=MEMORY).double()
    for name in ("query", "key", "energy"):
        getattr(ours, name).weight.data.copy_(getattr(reference, f"{name}_layer").weight)
    state = torch.randn(ROWS, DIM, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(ROWS, SOURCE, MEMORY, dtype=torch.float64, requires_grad=True)
    seen = torch.arange(SOURCE) < torch.tensor([7, 2, 5])[:, None]
    reference.compute_proj_keys(memory)
    context, weights = reference(query=state[:, None], mask=seen[:, None], values=memory)

    no_gates = [
        torch.zeros(1, *shape, dtype=torch.float64) for shape in ((1, ROWS, 3 * DIM), (DIM, 2 * DIM), (DIM, DIM))
    ]
    values = torch.zeros(ROWS, SOURCE, 3 * DIM, dtype=torch.float64)
    look = StepAttention(ours.query.weight.mT, ours.key(memory), values, ours.energy.weight[0], seen[None])
    actual = gru_scan(*no_gates, state[None], look).weights
    assert actual is not None
    ours_context = (actual.transpose(0, 1) @ memory)[:, 0]
    torch.testing.assert_close(actual[0], weights[:, 0], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(ours_context, context[:, 0], atol=1e-10, rtol=1e-10)
    grad_output = torch.randn_like(ours_context)
    for gradient, expected in zip(
        leaves(ours_context, grad_output, state, memory, ours),
        leaves(context[:, 0], grad_output, state, memory, reference),
    ):
        torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=1e-10)


def leaves(y: Tensor, grad_output: Tensor, state: Tensor, memory: Tensor, module: torch.nn.Module) -> list[Tensor]:
    """The gradients of the state, the memory and the three matrices, by the order of their shapes."""
    weights = sorted(module.parameters(), key=lambda weight: weight.shape)
    return list(torch.autograd.grad((y * grad_output).sum(), [state, memory, *weights]))
