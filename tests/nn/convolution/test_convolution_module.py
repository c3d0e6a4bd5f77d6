"""The Conformer's convolution module, token by token, with padding and in pieces."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models.embedding import positions_of
from manyformer.nn.convolution.convolution_module import ConvolutionModule
from manyformer.nn.core import PADDING_SEGMENT, Context

DIM, SIZE = 6, 5


def make_module(**options: Any) -> ConvolutionModule:
    torch.manual_seed(4)
    module = ConvolutionModule(DIM, SIZE, **options).double()
    if isinstance(module.norm, nn.BatchNorm1d):
        module.norm.running_mean.normal_()  # type: ignore[union-attr]
        module.norm.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    return module


def apply(module: ConvolutionModule, x: Tensor, segments: Tensor | None = None) -> Tensor:
    columns = torch.zeros(x.shape[:2], dtype=torch.long)
    return module(x, Context(positions_of(columns, segments, None)[0])).y


def by_tokens(module: ConvolutionModule, x: Tensor) -> Tensor:
    """One document (l, d), token by token, tap by tap."""
    value, gate = (x @ module.gate_and_up.weight.T).chunk(2, -1)
    gated, first = value * gate.sigmoid(), 1 - SIZE if module.causal else -(SIZE // 2)
    sums = torch.zeros_like(x)
    for token in range(len(x)):
        for tap in range(SIZE):
            if 0 <= token + first + tap < len(x):
                sums[token] += gated[token + first + tap] * module.depthwise[tap]
    return F.silu(module.norm(sums)) @ module.down.weight.T


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("padded", ["right", "left"])
def test_each_document_is_convolved_by_itself(causal: bool, norm: str, padded: str) -> None:
    module = make_module(causal=causal, norm=norm).eval()
    x, segments = torch.randn(2, 9, DIM, dtype=torch.float64), torch.zeros(2, 9, dtype=torch.long)
    valid = slice(0, 4) if padded == "right" else slice(5, 9)
    segments[1] = PADDING_SEGMENT
    segments[1, valid] = 0
    y = apply(module, x, segments)
    torch.testing.assert_close(y[0], by_tokens(module, x[0]))
    torch.testing.assert_close(y[1, valid], by_tokens(module, x[1, valid]))
    torch.testing.assert_close(apply(module, x)[0], y[0])


def test_the_means_of_training_leave_padding_out() -> None:
    module, reference = make_module().train(), make_module().train()
    x, segments = torch.randn(2, 9, DIM, dtype=torch.float64), torch.zeros(2, 9, dtype=torch.long)
    segments[1, 4:] = PADDING_SEGMENT
    y = apply(module, x, segments)
    rows = reference.gate_and_up(x[0]), reference.gate_and_up(x[1, :4])
    kernel = reference.depthwise.mT[:, None]
    sums = [F.conv1d(F.glu(row, -1).mT[None], kernel, padding=SIZE // 2, groups=DIM)[0].mT for row in rows]
    expected = reference.down(F.silu(reference.norm(torch.cat(sums))))
    torch.testing.assert_close(torch.cat([y[0], y[1, :4]]), expected)
    for ours, theirs in zip(module.norm.buffers(), reference.norm.buffers()):
        torch.testing.assert_close(ours, theirs)


def test_an_even_size_has_no_centre() -> None:
    with pytest.raises(UserError, match=r"kernel_size \(4\).*odd unless causal"):
        ConvolutionModule(DIM, 4)
    module = make_module()
    state = module.init_state(1, device=torch.device("cpu"), dtype=torch.float64)
    ctx = Context(positions_of(torch.zeros(1, 3, dtype=torch.long), None, None)[0])
    with pytest.raises(ValueError, match="only a causal one can continue"):
        module(torch.zeros(1, 3, DIM, dtype=torch.float64), ctx, state)
