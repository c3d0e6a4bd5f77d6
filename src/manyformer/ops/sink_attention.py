"""Softmax attention with one more logit for each head, which takes weight and gives nothing."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.ops.softmax_attention import fused_attention


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
    sink_channel = (sinks / scale).to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
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
