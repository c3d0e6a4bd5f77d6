"""Query-key normalization: queries and keys of fixed length, so that cached keys keep their scale."""

from typing import final

import torch
from torch import nn

from manyformer.core import LayerOutput, State
from manyformer.head_selection import PerHeadTensors
from manyformer.kernels.kernel import Kernel, KernelCall

EPSILON = 1e-6
"""Added to the squared length of a query or a key: a vector of zeros stays zero."""


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
