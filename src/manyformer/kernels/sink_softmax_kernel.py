"""Softmax attention that may attend to nothing: each head has a learned logit beside its scores."""

from typing import final

import torch
from torch import nn

from manyformer.core import LayerOutput, no_watch
from manyformer.head_selection import PerHeadTensors
from manyformer.kernels.kernel import Kernel, KernelCall
from manyformer.masks import AllKeys, Mask
from manyformer.ops.sink_attention import sink_attention, sink_attention_reference


@final
class SinkSoftmaxKernel(Kernel, PerHeadTensors):
    """Softmax over the scores of visible keys and one learned logit of the head, whose weight is left out.

    The attention sinks of gpt-oss (OpenAI 2025, arXiv:2508.10925); a logit of 0 is the softmax with a 1 in the
    denominator. Equal to softmax times sigmoid(logsumexp of the scores - logit), so that weights sum to less than 1,
    and a token that sees no key gets zeros. The sinks of StreamingLLM (Xiao et al. 2024) are first tokens instead. The
    scale is 1 / sqrt(e) by default. All calls take torch's fused attention with a dense mask."""

    supports = frozenset({"query", "key"})
    head_axes = (("sinks", -1),)

    def __init__(self, heads: int, mask: Mask | None = None, *, scale: float | None = None) -> None:
        super().__init__()
        self.mask = self.cache_mask = AllKeys() if mask is None else mask
        self.scale = scale
        self.sinks = nn.Parameter(torch.empty(heads))
        nn.init.normal_(self.sinks, std=0.02)

    def forward(self, call: KernelCall) -> LayerOutput:
        q, k, v, query_positions, key_positions, _, state, _ = call
        mask = self.mask.dense(query_positions, key_positions, q.shape[1])
        if self.scale is None:
            scale = q.shape[-1] ** -0.5
        else:
            scale = self.scale
        if call.watch is no_watch:
            return LayerOutput(sink_attention(q, k, v, self.sinks, mask, scale=scale), state)
        y, weights = sink_attention_reference(q, k, v, self.sinks, mask, scale=scale)
        call.watch(self, "weights", weights)
        return LayerOutput(y, state)

    def explain(self, call: KernelCall) -> str:
        if call.watch is no_watch:
            return f"sdpa: the dense mask of {self.mask!r}, with one more key for the sink"
        return "naive: the weights are watched, and only this path forms them"

    def extra_repr(self) -> str:
        return f"{self.mask!r}"
