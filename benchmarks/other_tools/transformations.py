"""Columns of torch.func and of derivatives beyond the first."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import manyformer as mf
from other_tools.comparisons import WrongResult, compare, compare_all
from other_tools.subject import LENGTH, Subject, gradients_of, output_of, scalar_of

WITHIN_SEGMENT = {"memorizing-transformer": 4}
"""Lengths without a memory: what is looked up there gets no gradient, but differences of gradients contain it."""


def functional(subject: Subject) -> None:
    """`functional_call` with other weights: theirs while it is called, the model's own afterwards."""
    model = subject.model()
    inputs = subject.inputs(model)
    before = output_of(model, inputs).detach()
    weights = {name: weight.detach() * 0.5 for name, weight in model.named_parameters()}
    other = subject.fresh()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, weight in other.named_parameters():
            weight.copy_(weights[name])
    compare(functional_call(model, weights, inputs).logits, output_of(other, inputs), "the call")
    compare(output_of(model, inputs), before, "the model afterwards", 0.0)


def per_sample(subject: Subject) -> None:
    """Gradients of single rows by vmap."""
    model = subject.model()
    inputs = subject.inputs(model, rows=3)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], *row: Tensor) -> Tensor:
        rows = [x[None] if isinstance(x, Tensor) else x for x in row]
        return scalar_of(functional_call(model, weights, tuple(rows)).logits)

    axes = [0 if isinstance(x, Tensor) else None for x in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        found = vmap(grad(loss), in_dims=(None, *axes))(weights, *inputs)
    for row in range(3):
        single = [x[row : row + 1] if isinstance(x, Tensor) else x for x in inputs]
        compare_all({name: x[row] for name, x in found.items()}, gradients_of(model, tuple(single)))


def forward_mode(subject: Subject) -> None:
    """A directional derivative by `jvp` against the gradient."""
    model = subject.model()
    inputs = subject.inputs(model)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    torch.manual_seed(1)
    direction = {name: torch.randn_like(weight) for name, weight in weights.items()}
    gradients = gradients_of(model, inputs)
    expected = sum((gradients[name] * direction[name]).double().sum() for name in weights)
    terms = torch.stack([(gradients[name] * direction[name]).double().norm() for name in weights]).norm()

    def value(weights: dict[str, Tensor]) -> Tensor:
        return scalar_of(functional_call(model, weights, inputs).logits)

    with sdpa_kernel(SDPBackend.MATH):
        _, slope = jvp(value, (weights,), (direction,))
    if not abs(float(slope) - float(expected)) <= 1e-5 * max(float(terms), abs(float(expected)), 1e-3):
        raise WrongResult(f"{float(slope):.6g} in place of {float(expected):.6g}")


def second_derivative(subject: Subject) -> None:
    """A product with the Hessian in float64, against differences of gradients."""
    model = subject.model().double()
    inputs = subject.inputs(model, length=WITHIN_SEGMENT.get(subject.recipe, LENGTH))
    names = [name for name, _ in model.named_parameters()]
    weights = list(model.parameters())
    torch.manual_seed(1)
    direction = [torch.randn_like(weight) for weight in weights]
    with mf.nn.plain_operations():
        scalar = scalar_of(output_of(model, inputs))
        first = torch.autograd.grad(scalar, weights, create_graph=True, allow_unused=True)
        slope = sum((g * d).sum() for g, d in zip(first, direction) if g is not None and g.requires_grad)
        found = torch.autograd.grad(slope, weights, allow_unused=True)
    product = {name: torch.zeros_like(weight) if x is None else x for name, weight, x in zip(names, weights, found)}
    # a step may change the side of a ReLU, or the choice of a layer: a shorter one does not
    for step in (1e-7, 1e-9):
        expected = _differences(model, inputs, direction, step)
        try:
            compare_all(product, expected, 1e-4)
        except WrongResult:
            if step == 1e-9:
                raise
        else:
            return


def _differences(model: nn.Module, inputs: tuple[Any, ...], direction: list[Tensor], step: float) -> dict[str, Tensor]:
    """Differences of gradients along a direction."""
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            for weight, towards in zip(model.parameters(), direction):
                weight.add_(towards, alpha=sign * step)
        sides.append(gradients_of(model, inputs))
        with torch.no_grad():
            for weight, towards in zip(model.parameters(), direction):
                weight.sub_(towards, alpha=sign * step)
    return {name: (sides[0][name] - sides[1][name]) / (2 * step) for name in sides[0]}


COLUMNS = {
    "functional_call": functional,
    "vmap gradients": per_sample,
    "jvp": forward_mode,
    "second derivative": second_derivative,
}
