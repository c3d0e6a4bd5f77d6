"""The state of a recurrence over tokens that several processes share: each begins with that of the one before it.

What is sent does not grow with the number of tokens. The processes compute one after the other, in the backward pass in
reverse order.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyformer.core import State, tree_map
from manyformer.ops.token_ring import TokenRing
from manyformer.torch_internals import compiler_disabled


@compiler_disabled
def with_passed_state(
    recur: Callable[[State], tuple[Tensor, State]], first: State, like: State, ring: TokenRing
) -> Tensor:
    """The outputs of `recur`, which maps the state before this process's tokens to outputs and the state after them.

    `first` is the state before all tokens, `like` one of the shapes that states have after some. Every process takes
    the gradient if one does.
    """
    # gradients of states are sent in any case, so that no process waits in vain
    anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
    state = first
    if ring.rank > 0:
        tensors = iter(_ReceiveState.apply(anchor, ring, *_tensors(like)))  # type: ignore[no-untyped-call]
        state = tree_map(lambda _: next(tensors), like)
    y, state = recur(state)
    if ring.rank + 1 == ring.size:
        return y
    sent: Tensor = _SendState.apply(y, ring, *_tensors(state))  # type: ignore[no-untyped-call]
    return sent


class _ReceiveState(torch.autograd.Function):
    """Tensors of the previous process; their gradients go back to it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ring: TokenRing, *like: Tensor) -> tuple[Tensor, ...]:
        tensors = ring.receive(like, ring.rank - 1)
        ctx.ring = ring
        ctx.is_float = [tensor.is_floating_point() for tensor in tensors]
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.is_floating_point()))
        return tuple(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        floats = [grad.contiguous() for grad, is_float in zip(grads, ctx.is_float, strict=True) if is_float]
        ctx.ring.send(floats, ctx.ring.rank - 1)
        return (None, None, *(None for _ in grads))


class _SendState(torch.autograd.Function):
    """`y` as it is; the other tensors are sent to the next process, which returns their gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ring: TokenRing, *tensors: Tensor) -> Tensor:
        ring.send([tensor.contiguous() for tensor in tensors], ring.rank + 1)
        ctx.ring = ring
        ctx.like = [torch.empty_like(tensor) if tensor.is_floating_point() else None for tensor in tensors]
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        grads = iter(ctx.ring.receive([like for like in ctx.like if like is not None], ctx.ring.rank + 1))
        return (grad_y, None, *(None if like is None else next(grads) for like in ctx.like))


def _tensors(state: State) -> list[Tensor]:
    """All tensors of a state, in the order of `tree_map`."""
    tensors: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    tree_map(add, state)
    return tensors
