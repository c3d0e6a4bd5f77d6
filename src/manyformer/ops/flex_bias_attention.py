"""Softmax attention with a term for each distance, by FlexAttention: for CUDA, where it compiles to one fused kernel.

On a CPU FlexAttention has no gradient; there its eager form serves to test the functions given to it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from manyformer.ops.toeplitz_attention import QueryOffset


def attend(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    terms: Float[Tensor, "#b #h #l r"],
    back: int,
    ahead: int,
    span: QueryOffset,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax of scale q_i k_j + terms[i, r_ij] over keys j; row 0 of the terms is for keys `back` or more before."""
    run: Any = compiled() if q.device.type == "cuda" else flex_attention
    mask = _causal(q.shape[2], k.shape[2], span.offset, q.device) if span.causal else None
    modify = score_mod(terms.expand(-1, q.shape[1], -1, -1), back, ahead, span.offset)
    y: Tensor = run(q, k, v, score_mod=modify, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y


def score_mod(terms: Float[Tensor, "#b h #l r"], back: int, ahead: int, offset: int) -> Callable[..., Tensor]:
    """A function that adds to the score of a pair the term for its distance."""
    if terms.shape[0] == terms.shape[2] == 1:
        alike = terms[0, :, 0]
        return lambda score, b, h, q, k: score + alike[h, (k - q - offset).clamp(-back, ahead) + back]
    return lambda score, b, h, q, k: score + terms[b, h, q, (k - q - offset).clamp(-back, ahead) + back]


@cache
def compiled() -> Callable[..., Any]:
    """FlexAttention compiled as a whole: without `fullgraph` one bad call makes all later ones slow, silently."""
    return torch.compile(flex_attention, fullgraph=True)


@cache
def _causal(queries: int, keys: int, offset: int, device: torch.device) -> BlockMask:
    """The blocks that a causal mask leaves; making them looks at every pair, so they are kept."""
    return create_block_mask(lambda b, h, q, k: k <= q + offset, None, None, queries, keys, device=device)
