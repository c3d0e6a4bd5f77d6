"""Handwritten gradients give way to operations of torch under transformations, and refuse a second derivative."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.models import Model
from manyformer.nn import plain_operations
from manyformer.nn.runtime.length_norms import rms_norm

RECIPES = ["mamba-2", "gated-deltanet", "performer", "shaw", "mixtral", "reformer"]


def tokens_of(model: Model, rows: int = 2) -> tuple[Tensor, ...]:
    tokens = torch.randint(1, 20, (rows, 12), generator=torch.Generator().manual_seed(0))
    return (tokens, tokens) if hasattr(model, "embed_target") else (tokens,)


@pytest.mark.parametrize("recipe", RECIPES)
def test_plain_operations_compute_the_same_gradient(recipe: str) -> None:
    model = build_tiny(recipe, {}, 0).eval()
    tokens = tokens_of(model)
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(*tokens).logits.square().sum(), weights, allow_unused=True)
    with plain_operations():
        logits = model(*tokens).logits
    found = torch.autograd.grad(logits.square().sum(), weights, allow_unused=True)
    scale = max(float(gradient.abs().max()) for gradient in expected if gradient is not None)
    for one, other in zip(found, expected):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * scale)


def test_a_second_derivative_is_refused_or_right() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    # the gradient of a sum: nothing that reaches the formula requires gradients itself
    (first,) = torch.autograd.grad(rms_norm(x, weight, eps=1e-5).sum(), x, create_graph=True)
    with pytest.raises(UserError, match="plain_operations"):
        first.square().sum().backward()

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        with plain_operations():
            return rms_norm(x, weight, eps=1e-5)

    assert torch.autograd.gradgradcheck(plain, (x, weight))


def test_plain_operations_hold_for_one_thread() -> None:
    """While one thread is inside of a block, the gradients and the attention of another one are the usual ones."""
    model = build_tiny("transformer-lm", {}, 0).eval()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    is_inside = threading.Barrier(2)
    is_done = threading.Barrier(2)

    def operations() -> set[str]:
        with torch.autograd.profiler.profile() as profile:
            model(*tokens_of(model))
        return {event.name for event in profile.function_events if "attention" in event.name}

    def inside() -> Tensor:
        with plain_operations():
            is_inside.wait(60)
            y = rms_norm(x, weight, eps=1e-5).sum()
            is_done.wait(60)
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return second

    usual = operations()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(inside)
        is_inside.wait(60)
        assert operations() == usual
        (first,) = torch.autograd.grad(rms_norm(x, weight, eps=1e-5).sum(), x, create_graph=True)
        with pytest.raises(UserError, match="plain_operations"):
            first.square().sum().backward()
        is_done.wait(60)
        assert second.result().abs().max() > 0
    with plain_operations():
        assert operations() != usual


def test_gradients_of_single_rows_are_those_of_a_loop() -> None:
    model = build_tiny("gated-deltanet", {}, 0).eval()
    (tokens,) = tokens_of(model, 3)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, weights, (row[None],)).logits.square().sum()

    by_row = vmap(grad(loss), in_dims=(None, 0))(weights, tokens)
    for row in range(3):
        model.zero_grad()
        model(tokens[row : row + 1]).logits.square().sum().backward()
        for name, weight in model.named_parameters():
            assert weight.grad is not None
            scale = float(weight.grad.abs().max()) + 1e-6
            torch.testing.assert_close(by_row[name][row], weight.grad, rtol=0, atol=1e-4 * scale)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_slope_forward_is_the_product_with_the_gradient() -> None:
    model = build_tiny("mamba-2", {}, 0).eval().double()
    (tokens,) = tokens_of(model)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    direction = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return functional_call(model, weights, (tokens,)).logits.square().sum()

    _, slope = jvp(loss, (weights,), (direction,))
    model(tokens).logits.square().sum().backward()
    expected = sum((weight.grad * direction[name]).sum() for name, weight in model.named_parameters())  # type: ignore[operator]
    torch.testing.assert_close(slope, expected)


@pytest.fixture
def without_shape_checks() -> Iterator[None]:
    """The checks of shapes, which tests alone have, cannot be recorded."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("recipe", ["gla", "rwkv-7", "fox", "compressive-transformer", "deepseek", "infini-attention"])
def test_a_traced_model_gives_the_logits_of_other_tokens(recipe: str) -> None:
    model = build_tiny(recipe, {}, 0).eval()
    (tokens,) = tokens_of(model)
    traced = torch.jit.trace(model, (tokens,), check_trace=False, strict=False)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(traced(tokens.flip(1))[0], model(tokens.flip(1)).logits)
