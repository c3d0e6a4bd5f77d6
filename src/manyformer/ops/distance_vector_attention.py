"""Softmax attention with a learned vector for every distance, computed one block of queries at a time.

The products of a block of queries with all distance vectors are one matrix product; aligning them with keys shifts each
row by one column, which is a view. Memory is linear in length: the weights of one block exist at a time.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.dropout import drop
from manyformer.ops.distance_vector_blocks import SegmentPair, ShiftedAttentionFunction, distances_met, hidden_keys
from manyformer.ops.toeplitz_attention import QueryOffset
from manyformer.position.position import toeplitz_view
from manyformer.recompute import recompute_for_gradient

BLOCK = 128
"""Queries per block where the gradient is not written by hand."""


def distance_vector_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    vectors: Float[Tensor, "h r e"],
    query_bias: Float[Tensor, "h e"] | None,
    back: int,
    query_offset: QueryOffset,
    *,
    scale: float,
    dropout: float = 0.0,
    segments: SegmentPair | None = None,
) -> Float[Tensor, "b h l f"]:
    """Softmax of scale q_i k_j + (q_i + query_bias) vectors[r_ij] over keys j, applied to v_j.

    Row `back` is distance 0, and every distance that occurs has a row of its own. Every query must see a key. Scores
    are recomputed for the gradient, and so are weights where there are many.
    """
    if not dropout and q.device.type in ("cpu", "meta"):
        dtype = v.dtype
        compute_dtype = torch.promote_types(v.dtype, torch.float32)
        inputs = (None if x is None else x.to(compute_dtype) for x in (q, query_bias, k, v, vectors))
        y: Tensor = ShiftedAttentionFunction.apply(*inputs, back, query_offset, scale, segments)  # type: ignore[no-untyped-call]
        return y.to(dtype)

    def block(q: Tensor, biased_q: Tensor, k: Tensor, v: Tensor, vectors: Tensor, begin: int) -> Tensor:
        logits = q @ k.mT * scale + toeplitz_view(biased_q @ vectors.mT, k.shape[2])
        queries = slice(begin, begin + q.shape[2])
        hidden_pairs = hidden_keys(query_offset, segments, slice(0, q.shape[0]), queries, k.shape[2], q.device)
        if hidden_pairs is not None:
            logits = logits.masked_fill(hidden_pairs if segments is None else hidden_pairs[:, None], -torch.inf)
        compute_dtype = torch.promote_types(logits.dtype, torch.float32)
        return drop(logits.softmax(-1, dtype=compute_dtype).to(v.dtype), dropout) @ v

    biased_q = q if query_bias is None else q + query_bias[:, None]
    parts = []
    for begin in range(0, q.shape[2], BLOCK):
        end = min(begin + BLOCK, q.shape[2])
        rows, num_keys = distances_met(back, query_offset, begin, end, k.shape[2])
        tokens = q[:, :, begin:end], biased_q[:, :, begin:end], k[:, :, :num_keys], v[:, :, :num_keys]
        parts.append(recompute_for_gradient(block, *tokens, vectors[:, rows], begin, dropout=dropout))
    return torch.cat(parts, dim=2)
