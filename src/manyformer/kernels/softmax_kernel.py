"""Scaled dot-product softmax attention, computed on the fastest path that is exact for the call."""

import math
from typing import Literal, final, get_args

from manyformer.core import LayerOutput
from manyformer.kernels.kernel import Kernel, KernelCall, TokenRing
from manyformer.kernels.ring_attention import ring_attention
from manyformer.kernels.softmax_forms import SoftmaxCall
from manyformer.kernels.softmax_paths import SoftmaxPath, choose
from manyformer.masks import AllKeys, Mask


@final
class SoftmaxKernel(Kernel):
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) under a mask.

    The scale is 1 / sqrt(e) by default. A token that sees no key gets zeros; outputs of padding are undefined.
    `dropout` acts on the weights; torch's fast CPU kernel does not support it, so the default is 0. `path` forces a
    path: "naive" (any mask and position, the definition), "sdpa" (torch's fused kernel), "documents" (packed rows on a
    CPU, one call for each document), "sparse" (only the blocks that the mask shows, without dropout of weights),
    "blocked" (any mask and position, one block of queries at a time, so that memory is linear in length) or "flex"
    (masks, and positions that add to scores by distance, in one compiled kernel; chosen only on CUDA, because it has no
    gradient on a CPU, and from 128 queries on, because it makes a block mask for each call). Raises ValueError if a
    forced path does not support a call.
    """

    supports = frozenset({"query", "key", "score", "value"})

    def __init__(
        self,
        mask: Mask | None = None,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        path: Literal["auto"] | SoftmaxPath = "auto",
    ) -> None:
        super().__init__()
        if path != "auto" and path not in get_args(SoftmaxPath):
            raise ValueError(
                f"SoftmaxKernel: path '{path}' does not exist; choose from auto, {', '.join(get_args(SoftmaxPath))}"
            )
        self.mask = self.cache_mask = AllKeys() if mask is None else mask
        self.dropout = dropout
        self.scale = scale
        self.path = path

    def forward(self, call: KernelCall) -> LayerOutput:
        softmax = self._softmax_call(call)
        return LayerOutput(choose(softmax).compute(softmax), call.state)

    def explain(self, call: KernelCall) -> str:
        softmax = self._softmax_call(call)
        return choose(softmax).explain(softmax)

    def drop_weights(self, probability: float) -> bool:
        self.dropout = probability
        return True

    def column_obstacle(self) -> str | None:
        if self.dropout:
            return "attention_dropout needs the weights of all keys"
        return None

    def share_columns(self, ring: TokenRing) -> None:
        def forward(call: KernelCall) -> LayerOutput:
            scale = self.score_scale(call.q.shape[-1])
            y = ring_attention(call.q, call.k, call.v, call.query_positions, self.mask, ring, scale=scale)
            return LayerOutput(y, call.state)

        self.forward = forward  # type: ignore[method-assign]
        self.explain = lambda call: f"ring: keys visit {ring.size} processes"  # type: ignore[method-assign]

    def extra_repr(self) -> str:
        return f"{self.mask!r}, path={self.path}"

    def _softmax_call(self, call: KernelCall) -> SoftmaxCall:
        dropout = self.dropout if self.training else 0.0
        scale = self.score_scale(call.q.shape[-1])
        return SoftmaxCall(self, call, mask=self.mask, scale=scale, dropout=dropout, path=self.path)

    def score_scale(self, head_dim: int) -> float:
        """What scores are multiplied by."""
        if self.scale is None:
            return 1 / math.sqrt(head_dim)
        return self.scale
