"""Operations with handwritten gradients, which give way to operations of torch where those alone are right.

A handwritten gradient saves time and memory, and is a gradient of the first order in reverse. `torch.func`, derivatives
forward, derivatives of gradients and exported graphs need operations that torch knows: under transformations these
functions take them by themselves, and a second derivative asks for `plain_operations`.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.nn.runtime.torch_internals import HIDING_MODES, constant_for_compiler, is_transformed

_is_open: ContextVar[bool] = ContextVar("plain_operations", default=False)


@contextmanager
def plain_operations() -> Iterator[None]:
    """Compute with operations of torch alone inside the block, so that gradients can be differentiated again.

    Hessian products, gradient penalties and the like: the forward pass belongs into the block. Attention is computed by
    its definition, too, as torch's fused kernels have no second derivative. It takes more time and memory. The block
    holds for its thread, or its task of asyncio, alone."""
    token = _is_open.set(True)
    try:
        yield
    finally:
        _is_open.reset(token)


@constant_for_compiler
def is_within_plain_operations() -> bool:
    """Whether this is inside of a `plain_operations` block; a question that compilers cannot trace."""
    return _is_open.get()


def needs_plain_operations() -> bool:
    """Whether a handwritten gradient would be lost: inside `plain_operations`, and under transformations of torch."""
    return is_within_plain_operations() or is_transformed()


def hides_values() -> bool:
    """`needs_plain_operations`, or tensors without numbers: no computation is chosen by what tensors hold.

    Graphs of a compiler are not meant, which end where values decide."""
    return is_within_plain_operations() or is_transformed(HIDING_MODES)


class HandwrittenGradient(torch.autograd.Function):
    """A `torch.autograd.Function` that is replaced by `plain` where `needs_plain_operations`.

    Its gradient cannot be differentiated, unless `backward` is made of operations of torch on what it saved as inputs
    or outputs and says so (`has_second_derivative`). Graphs of `torch.compile` have what `in_graph` says."""

    has_second_derivative: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "backward" in cls.__dict__ and not cls.has_second_derivative:
            cls.backward = staticmethod(_of_first_order(cls.backward))  # type: ignore[method-assign]

    @classmethod
    def call(cls, *arguments: Any) -> Any:
        """The outputs of the operation; not named `apply`, as a compiler takes every such call for torch's own."""
        # `needs_plain_operations` in place: one token asks this in every layer
        if is_within_plain_operations() or is_transformed():
            return cls.plain(*arguments)
        if torch.compiler.is_compiling():
            return cls.in_graph(*arguments)
        if not torch.is_grad_enabled():
            # for one token, torch's record of the call would take longer than what is computed
            return cls.forward(_NothingSaved(), *arguments)
        return cls.apply(*arguments)  # type: ignore[no-untyped-call]

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        """The outputs by operations of torch; here by those of `forward`, where they are differentiable."""
        return cls.forward(_NothingSaved(), *arguments)

    @classmethod
    def in_graph(cls, *arguments: Any) -> Any:
        """The outputs in a graph of `torch.compile`, which here traces both passes."""
        return cls.apply(*arguments)  # type: ignore[no-untyped-call]


class _NothingSaved:
    """Takes the place of the context of `forward` where no gradient is taken, or operations save what theirs needs."""

    needs_input_grad: tuple[bool, ...] = ()
    """No argument needs a gradient."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save nothing."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Mark nothing."""

    def set_materialize_grads(self, value: bool) -> None:  # noqa: FBT001 - the signature is torch's
        """Set nothing."""


def _of_first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass whose results say so where they are differentiated."""

    @functools.wraps(backward)
    def of_first_order(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if isinstance(results, tuple):
            return tuple(_refuse_derivative(result) for result in results)
        return _refuse_derivative(results)

    return of_first_order


def _refuse_derivative(result: Any) -> Any:
    """A gradient that raises where it is differentiated, also if torch sees nothing in it that requires gradients."""
    if not isinstance(result, Tensor):
        return result
    return _RefusedDerivative.apply(result.detach().requires_grad_())  # type: ignore[no-untyped-call]


class _RefusedDerivative(torch.autograd.Function):
    """The identity, whose gradient is refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise UserError(
            "this gradient was computed by a formula that has no derivative: for a second derivative, compute the "
            "forward pass inside `with manyformer.nn.plain_operations():`"
        )
