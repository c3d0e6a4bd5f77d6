"""The loss of many classes in chunks of tokens, against torch's cross-entropy of all logits."""

import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from manyformer.nn.ops.chunked_cross_entropy import LossOptions, chunked_cross_entropy
from manyformer.nn.runtime.costs import count_flops

IGNORED = -100


def draw(tokens: int, dtype: torch.dtype, *, has_bias: bool) -> tuple[list[Tensor], Tensor]:
    """Features, a matrix, perhaps offsets, and targets of which a quarter do not count."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, 6), (11, 6), *([(11,)] if has_bias else [])]
    leaves = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(0, 11, (tokens,), generator=generator)
    targets[::4] = IGNORED
    return leaves, targets


def in_chunks(leaves: list[Tensor], targets: Tensor, *, smoothing: float, tokens_per_chunk: int = 4) -> Tensor:
    bias = leaves[2] if len(leaves) == 3 else None
    return chunked_cross_entropy(leaves[0], leaves[1], bias, targets, LossOptions(IGNORED, smoothing, tokens_per_chunk))


def of_all_logits(leaves: list[Tensor], targets: Tensor, *, smoothing: float) -> Tensor:
    return F.cross_entropy(F.linear(*leaves), targets, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")


@pytest.mark.parametrize("tokens", [1, 4, 13])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_loss_and_gradients_equal_those_of_all_logits(tokens: int, smoothing: float, has_bias: bool) -> None:
    leaves, targets = draw(tokens, torch.float64, has_bias=has_bias)
    loss = in_chunks(leaves, targets, smoothing=smoothing)
    expected = of_all_logits(leaves, targets, smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(3.0 * loss, leaves)
    expected_gradients = torch.autograd.grad(3.0 * expected, leaves)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-11, atol=1e-12)


def test_logits_beyond_the_range_of_exponentials_have_a_loss() -> None:
    leaves, targets = draw(13, torch.float32, has_bias=False)
    huge = [leaves[0].detach() * 1e4, leaves[1]]
    torch.testing.assert_close(in_chunks(huge, targets, smoothing=0.0), of_all_logits(huge, targets, smoothing=0.0))


def test_a_frozen_matrix_or_frozen_features_have_no_gradient() -> None:
    for frozen in (0, 1):
        leaves, targets = draw(13, torch.float64, has_bias=True)
        leaves[frozen].requires_grad_(False)
        rest = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(in_chunks(leaves, targets, smoothing=0.1), rest)
        expected = torch.autograd.grad(of_all_logits(leaves, targets, smoothing=0.1), rest)
        torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-12)


def test_autocast_gives_the_products_its_precision_and_the_gradients_that_of_their_parameters() -> None:
    leaves, targets = draw(13, torch.float32, has_bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = in_chunks(leaves, targets, smoothing=0.1)
    gradients = torch.autograd.grad(loss, leaves)
    expected = torch.autograd.grad(of_all_logits(leaves, targets, smoothing=0.1), leaves)
    assert loss.dtype == torch.float32
    for gradient, exact in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.float32
        difference = (gradient - exact).norm() / exact.norm()
        # bfloat16 rounds to 1/256; without the cast the difference would be that of float32
        assert 1e-5 < difference < 0.02


def test_features_of_bfloat16_meet_a_matrix_of_float32_under_autocast() -> None:
    leaves, targets = draw(13, torch.float32, has_bias=False)
    features = leaves[0].detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = in_chunks([features, leaves[1]], targets, smoothing=0.0)
    gradients = torch.autograd.grad(loss, [features, leaves[1]])
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32]
    expected = torch.autograd.grad(of_all_logits(leaves, targets, smoothing=0.0), leaves)
    for gradient, exact in zip(gradients, expected, strict=True):
        assert (gradient - exact).norm() < 0.02 * exact.norm()


def test_the_compiler_makes_one_graph_of_it() -> None:
    leaves, targets = draw(13, torch.float32, has_bias=True)
    graphs = []

    def count(graph: torch.fx.GraphModule, examples: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(lambda *leaves: in_chunks(list(leaves), targets, smoothing=0.1), backend=count)
    with warnings.catch_warnings():
        # tracing instantiates functions with gradients, which torch itself calls deprecated
        warnings.simplefilter("ignore")
        actual = compiled(*leaves)
    torch.testing.assert_close(actual, in_chunks(leaves, targets, smoothing=0.1))
    torch.compiler.reset()
    assert len(graphs) == 1


def test_its_operations_are_three_products() -> None:
    leaves, targets = draw(13, torch.float32, has_bias=False)
    counted = count_flops(lambda: in_chunks(leaves, targets, smoothing=0.0).backward())
    assert counted == 3 * 2 * 13 * 6 * 11
