"""Differential attention: the weights of one head minus those of its pair."""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import LayerOutput, State
from manyformer.kernels.kernel import Kernel, KernelCall
from manyformer.length_norms import rms_norm


@final
class DifferentialKernel(Kernel):
    """(1 - c) RMSNorm(y_i - lambda y_j) for each pair of heads i and j = i + h / 2, with outputs y of `inner`.

    Ye et al. 2024 (arXiv:2410.05258), equations 1 to 3. Both heads read the values of both, side by side, and what a
    pair gives takes the place of its two heads, which are `width` wide each. lambda = exp(a1 b1) - exp(a2 b2) + c with
    four learned vectors that all heads share, and c = 0.8 - 0.6 exp(-0.3 `layer`) for layers counted from 0: weights
    may be negative, and what both heads attend to cancels. The norm has no weight, as in the class of `transformers`.
    Raises ValueError for an `inner` that has gates or keeps no keys."""

    couples_heads = True

    def __init__(self, inner: Kernel, width: int, layer: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        if inner.recurrent or inner.tied_qk or inner.gate_dim:
            raise ValueError(f"DifferentialKernel cannot wrap {type(inner).__name__}: it needs keys and plain values")
        self.inner = inner
        self.supports = inner.supports - {"value"}
        self.cache_mask = inner.cache_mask
        self.width = width
        self.eps = eps
        self.initial_lambda = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.query_1, self.key_1, self.query_2, self.key_2 = (nn.Parameter(torch.randn(width) * 0.1) for _ in range(4))

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return self.inner.init_state(batch, device=device, dtype=dtype)

    def forward(self, call: KernelCall) -> LayerOutput:
        y, state, loss = self.inner(_pair_values(call))
        first, second = y.chunk(2, dim=1)
        difference = first - self.subtracted_share().to(y.dtype) * second
        normalized = (1 - self.initial_lambda) * rms_norm(difference, eps=self.eps)
        halves = normalized.unflatten(-1, (2, self.width))  # type: ignore[no-untyped-call]
        return LayerOutput(halves.transpose(2, 3).flatten(1, 2), state, loss)

    def subtracted_share(self) -> Float[Tensor, ""]:
        """Lambda, the factor of the second head of each pair."""
        growth = (self.query_1 * self.key_1).sum().exp() - (self.query_2 * self.key_2).sum().exp()
        return growth + self.initial_lambda

    def explain(self, call: KernelCall) -> str:
        return self.inner.explain(_pair_values(call))

    def extra_repr(self) -> str:
        return f"initial_lambda={self.initial_lambda:.3f}"


def _pair_values(call: KernelCall) -> KernelCall:
    """The call with the values of key heads i and i + g / 2 side by side in both."""
    both = torch.cat(call.v.chunk(2, dim=1), -1)
    return call._replace(v=torch.cat([both, both], 1))
