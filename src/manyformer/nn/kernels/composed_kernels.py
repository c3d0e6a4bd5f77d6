"""Kernels made of other kernels: sums, query-key normalization, and the difference of two heads."""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.core import LayerOutput, State
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.length_norms import rms_norm

EPSILON = 1e-6
"""Added to the squared length of a query or a key: a vector of zeros stays zero."""


@final
class SumKernel(Kernel):
    """The sum of the outputs of several kernels on the same queries, keys and values.

    An example is Sinkhorn attention's mixture with vanilla attention (Tay et al. 2020, section 3.5). Raises ValueError
    for kernels that are recurrent, need gates or tie queries and keys.
    """

    def __init__(self, *kernels: Kernel) -> None:
        super().__init__()
        if len(kernels) < 2:
            raise ValueError(f"SumKernel needs at least 2 kernels, got {len(kernels)}")
        for kernel in kernels:
            if kernel.recurrent or kernel.gate_dim or kernel.tied_qk:
                name = type(kernel).__name__
                raise ValueError(f"SumKernel: {name} is recurrent, ties queries and keys, or needs gates")
        self.kernels = nn.ModuleList(kernels)
        # all kernels get the same position, so that each of them must be able to use it
        self.supports = frozenset.intersection(*(kernel.supports for kernel in kernels))

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return [kernel.init_state(batch, device=device, dtype=dtype) for kernel in self._kernel_list()]

    def forward(self, call: KernelCall) -> LayerOutput:
        if call.state is None:
            states = [None] * len(self.kernels)
        else:
            states = call.state
        outputs = [kernel(call._replace(state=state)) for kernel, state in zip(self._kernel_list(), states)]
        y = outputs[0].y
        loss = outputs[0].loss
        for output in outputs[1:]:
            y = y + output.y
            loss = loss + output.loss
        return LayerOutput(y, None if call.state is None else [output.state for output in outputs], loss)

    def explain(self, call: KernelCall) -> str:
        if call.state is None:
            states = [None] * len(self.kernels)
        else:
            states = call.state
        kernels = zip(self._kernel_list(), states)
        return "; and ".join(kernel.explain(call._replace(state=state)) for kernel, state in kernels)

    def _kernel_list(self) -> list[Kernel]:
        return list(self.kernels)  # type: ignore[arg-type]


@final
class QKNormKernel(Kernel, PerHeadTensors):
    """`inner` over keys of length 1 and queries of a learned length |s| for each head, initialized to 1.

    Query-key normalization (Henry et al. 2020, arXiv:2010.04245) as in the Memorizing Transformer (Wu et al. 2022,
    section 3.2): values are not changed. `inner` must not scale scores itself, e.g. `SoftmaxKernel(scale=1.0)`.
    """

    head_axes = (("scale", -1),)

    def __init__(self, inner: Kernel, heads: int) -> None:
        super().__init__()
        if inner.recurrent or inner.tied_qk or inner.gate_dim:
            reason = "is recurrent, ties queries and keys, or needs gates"
            raise ValueError(f"QKNormKernel cannot wrap {type(inner).__name__}, which {reason}")
        self.inner = inner
        self.supports = inner.supports
        self.cache_mask = inner.cache_mask
        self.scale = nn.Parameter(torch.ones(heads))

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return self.inner.init_state(batch, device=device, dtype=dtype)

    def forward(self, call: KernelCall) -> LayerOutput:
        return self.inner(self._normalize(call))

    def explain(self, call: KernelCall) -> str:
        return self.inner.explain(self._normalize(call))

    def _normalize(self, call: KernelCall) -> KernelCall:
        q, k = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (call.q, call.k))
        return call._replace(q=q * self.scale.abs().to(q.dtype)[:, None, None], k=k)


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
        # heads i and i + h / 2 are a pair; both read the values of both
        first, second = y.chunk(2, dim=1)
        difference = first - self.subtracted_share().to(y.dtype) * second
        normalized = (1 - self.initial_lambda) * rms_norm(difference, eps=self.eps)
        # (b, pairs, l, 2, width) to (b, h, l, width): what a pair gives fills its two heads
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
    # the first half of the key heads is paired with the second one
    both = torch.cat(call.v.chunk(2, dim=1), -1)
    return call._replace(v=torch.cat([both, both], 1))
