"""Softmax attention that may attend to nothing: each head has a learned logit beside its scores."""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.nn.core import LayerOutput, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.masks.mask import AllKeys, Mask
from manyformer.nn.ops.softmax_attention import fused_attention
from manyformer.nn.runtime.head_selection import PerHeadTensors


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


def sink_attention_reference(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    sinks: Float[Tensor, " h"],
    mask: Bool[Tensor, "#b #h l s"],
    *,
    scale: float,
) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h l s"]]:
    """Outputs and weights exp(s_ij) / (exp(sink_h) + sum_j exp(s_ij)), in float32 at least."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT * scale).to(compute_dtype).masked_fill(~mask, -torch.inf)
    sink_scores = sinks.to(compute_dtype)[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink_scores], -1).softmax(-1)[..., :-1].to(q.dtype)
    return weights @ v, weights


def sink_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    sinks: Float[Tensor, " h"],
    mask: Bool[Tensor, "#b #h l s"],
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """The same by torch's fused attention: the sink is a key with a value of 0, and a channel of its own scores it."""
    # divided by the scale, by which the kernel multiplies all scores
    sink_channel = (sinks / scale).to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
    # all other keys have a 0 in this channel, so that only the sink scores the sink's logit
    sink_key = F.pad(k.new_zeros(*k.shape[:2], 1, k.shape[3]), (0, 1), value=1.0)
    keys = torch.cat([F.pad(k, (0, 1)), sink_key], 2)
    return fused_attention(
        torch.cat([q, sink_channel], -1),
        keys,
        F.pad(v, (0, 0, 0, 1)),
        F.pad(mask, (0, 1), value=True),
        causal=False,
        scale=scale,
    )
