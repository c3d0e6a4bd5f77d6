"""Numbers of a training that are not finite, in gradients, weights and optimizer; and weights that stand still."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyformer.models.finite_weights import local_tensor
from manyformer.torch_internals import tensor_norms

LARGEST_SQUARED_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""The largest norm of a gradient whose square is a float32: all optimizers here keep sums of squared gradients."""

MIN_STEPS_WATCHED = 10
"""The fewest steps after which weights that have not changed are worth a word."""


class GradientNorms(NamedTuple):
    """The norm of the gradient of each weight that has one; on the device until somebody needs them."""

    weights: Sequence[nn.Parameter]
    norms: Tensor

    @classmethod
    def of(cls, weights: Sequence[nn.Parameter]) -> "GradientNorms | None":
        """The norms of the gradients of `weights`; None if none of them has a gradient."""
        graded = [weight for weight in weights if weight.grad is not None]
        gradients = [weight.grad for weight in graded if weight.grad is not None]
        if not graded:
            return None
        return cls(graded, torch.stack(tensor_norms(gradients)))

    @property
    def total(self) -> Tensor:
        """The norm of all gradients together, of all shards where gradients are sharded."""
        return full_tensor(torch.linalg.vector_norm(self.norms))

    def first_above(self, limit: float, names: dict[nn.Parameter, str]) -> str | None:
        """The name of the first weight whose gradient has no norm up to `limit`; reads from the device."""
        for weight, norm in zip(self.weights, full_tensor(self.norms).tolist(), strict=True):
            if not norm <= limit:
                return names[weight]
        return None


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or the whole of which a process holds a shard."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


class MovementWatch:
    """Watches whether steps change any weight at all, by an exact sum of the bits of each weight."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights
        self._sums: Tensor | None = None
        self._steps, self._largest_rate = 0, 0.0

    def begin(self) -> None:
        """Remember the weights as they are now."""
        self._sums = _bit_sums(self._weights)
        self._steps, self._largest_rate = 0, 0.0

    def count_step(self, learning_rate: float) -> None:
        """Count a step of the optimizer with this learning rate."""
        self._steps += 1
        self._largest_rate = max(self._largest_rate, learning_rate)

    def describe_standstill(self, *, run_ends: bool) -> str | None:
        """A sentence if no weight of this process has changed since `begin`, which then begins anew.

        A few steps are watched further, unless the run ends with them."""
        if not self._weights or self._sums is None or self._steps < (1 if run_ends else MIN_STEPS_WATCHED):
            return None
        steps, largest_rate, sums = self._steps, self._largest_rate, self._sums
        self.begin()
        assert self._sums is not None
        if largest_rate == 0 or not torch.equal(sums, self._sums):
            return None
        return (
            f"no weight has changed in the last {steps:,} steps, although the learning rate was up to "
            f"{largest_rate:.3g}: look at optim.lr, at optim.eps, and whether the loss depends on the weights"
        )


def _bit_sums(weights: Sequence[nn.Parameter]) -> Tensor:
    """The sum of the bits of each weight as integers: equal weights have equal sums, and changed ones hardly ever."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensors = [local_tensor(weight.detach()) for weight in weights]
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    return torch.stack([tensor.view(kinds[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors])
