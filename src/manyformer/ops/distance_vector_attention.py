"""Softmax attention with a vector for every distance, near and far: a block of queries at a time.

What a query gets from all distances is one product of matrices; of that, each row is what belongs to the keys one
place further to the left, which is a view. Memory is linear in length: many weights are never held at once.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyformer.dropout import drop
from manyformer.ops.distance_vector_blocks import SegmentPair, ShiftedAttentionFunction, distances_met, hidden
from manyformer.ops.toeplitz_attention import QueryOffset
from manyformer.position.distance_terms import toeplitz_view

BLOCK = 128


def attend(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    vectors: Float[Tensor, "h r e"],
    turn: Float[Tensor, "h e"] | None,
    back: int,
    span: QueryOffset,
    *,
    scale: float,
    dropout: float = 0.0,
    numbers: SegmentPair | None = None,
) -> Float[Tensor, "b h l f"]:
    """Softmax of scale q_i k_j + (q_i + turn) vectors[r_ij] over keys j, applied to v_j.

    Row `back` is the distance 0, and all distances that are met have their own rows. Every query must see a key. Scores
    are made anew for the gradient, and weights where there are many.
    """
    if dropout or q.device.type not in ("cpu", "meta"):
        meets = q if turn is None else q + turn[:, None]
        return _checkpointed(q, meets, k, v, vectors, back, span, scale, dropout, numbers)
    kind, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    given = (None if x is None else x.to(wide) for x in (q, turn, k, v, vectors))
    y: Tensor = ShiftedAttentionFunction.apply(*given, back, span, scale, numbers)  # type: ignore[no-untyped-call]
    return y.to(kind)


def _checkpointed(
    q: Tensor,
    meets: Tensor,
    k: Tensor,
    v: Tensor,
    vectors: Tensor,
    back: int,
    span: QueryOffset,
    scale: float,
    dropout: float,
    numbers: SegmentPair | None,
) -> Tensor:
    """The definition, block by block."""

    def block(q: Tensor, meets: Tensor, k: Tensor, v: Tensor, vectors: Tensor, begin: int) -> Tensor:
        logits = q @ k.mT * scale + toeplitz_view(meets @ vectors.mT, k.shape[2])
        queries = slice(begin, begin + q.shape[2])
        unseen = hidden(span, numbers, slice(0, q.shape[0]), queries, k.shape[2], q.device)
        if unseen is not None:
            logits = logits.masked_fill(unseen if numbers is None else unseen[:, None], -torch.inf)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return drop(logits.softmax(-1, dtype=wide).to(v.dtype), dropout) @ v

    parts = []
    for begin in range(0, q.shape[2], BLOCK):
        end = min(begin + BLOCK, q.shape[2])
        rows, seen = distances_met(back, span, begin, end, k.shape[2])
        given = q[:, :, begin:end], meets[:, :, begin:end], k[:, :, :seen], v[:, :, :seen], vectors[:, rows]
        if torch.is_grad_enabled():
            again = dropout > 0
            parts.append(checkpoint(block, *given, begin, use_reentrant=False, preserve_rng_state=again))
        else:
            parts.append(block(*given, begin))
    return torch.cat(parts, dim=2)
