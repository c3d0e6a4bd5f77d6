"""Softmax attention with a vector for every distance, near and far: a block of queries at a time.

What a query gets from all distances is one product of matrices; of that, each row is what belongs to the keys one
place further to the left, which is a view. Memory is linear in length, as no more than one block's scores exist.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyformer.dropout import drop
from manyformer.ops.toeplitz import Span
from manyformer.position.distance import along

BLOCK = 128


def attend(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    vectors: Float[Tensor, "#h r e"],
    bias: Float[Tensor, "#h r"] | None,
    back: int,
    span: Span,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "b h l f"]:
    """Softmax of scale q_i k_j + q_i vectors[r_ij] + bias[r_ij] over keys j, applied to v_j.

    Row `back` is the distance 0, and all distances that are met have their own rows. Scores and weights are made anew
    for the gradient.
    """

    def block(q: Tensor, k: Tensor, v: Tensor, vectors: Tensor, bias: Tensor | None, begin: int) -> Tensor:
        each = q @ vectors.mT
        each = each if bias is None else each + bias[:, None]
        logits = q @ k.mT * scale + along(each, k.shape[2])
        if span.causal:
            hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(span.offset + begin + 1)
            logits = logits.masked_fill(hidden, -torch.inf)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return drop(logits.softmax(-1, dtype=wide).to(v.dtype), dropout) @ v

    parts = []
    for begin in range(0, q.shape[2], BLOCK):
        end = min(begin + BLOCK, q.shape[2])
        seen = min(end + span.offset, k.shape[2]) if span.causal else k.shape[2]
        first = back - (span.offset + end - 1)
        rows = slice(first, first + seen + end - begin - 1)
        given = q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen], vectors[:, rows]
        shifts = None if bias is None else bias[:, rows]
        if torch.is_grad_enabled():
            again = dropout > 0
            parts.append(checkpoint(block, *given, shifts, begin, use_reentrant=False, preserve_rng_state=again))
        else:
            parts.append(block(*given, shifts, begin))
    return torch.cat(parts, dim=2)
