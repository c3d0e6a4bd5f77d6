"""Softmax attention with a term for each distance, by FlexAttention: for CUDA, where it compiles to one fused kernel.

On a CPU FlexAttention has no gradient; its eager form is used there to test the functions passed to it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from manyformer.ops.toeplitz_attention import QueryOffset

MIN_FLEX_WIDTH = 16
"""The fewest channels of keys and of values that the compiled kernel of torch 2.13 computes."""


def has_flex_width(q: Float[Tensor, "b h l e"], v: Float[Tensor, "b g s f"]) -> bool:
    """Whether FlexAttention has a kernel for this number of channels; its eager form, on a CPU, serves any."""
    return q.device.type == "cpu" or min(q.shape[-1], v.shape[-1]) >= MIN_FLEX_WIDTH


def flex_bias_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    terms: Float[Tensor, "#b #h #l r"],
    back: int,
    ahead: int,
    query_offset: QueryOffset,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax of scale q_i k_j + terms[i, r_ij] over keys j; row 0 of the terms is for keys at least `back` before."""
    flex: Any = compiled_flex_attention() if q.device.type == "cuda" else flex_attention
    mask = _causal_block_mask(q.shape[2], k.shape[2], query_offset.offset, q.device) if query_offset.causal else None
    modify_score = score_mod(terms.expand(-1, q.shape[1], -1, -1), back, ahead, query_offset.offset)
    y: Tensor = flex(q, k, v, score_mod=modify_score, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y


def score_mod(terms: Float[Tensor, "#b h #l r"], back: int, ahead: int, offset: int) -> Callable[..., Tensor]:
    """A FlexAttention `score_mod` that adds the term for the pair's distance."""
    if terms.shape[0] == terms.shape[2] == 1:
        shared_terms = terms[0, :, 0]
        return lambda score, b, h, q, k: score + shared_terms[h, (k - q - offset).clamp(-back, ahead) + back]
    return lambda score, b, h, q, k: score + terms[b, h, q, (k - q - offset).clamp(-back, ahead) + back]


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """FlexAttention compiled with `fullgraph`: without it one graph break makes all later calls slow, silently."""
    return torch.compile(flex_attention, fullgraph=True)


@cache
def _causal_block_mask(queries: int, keys: int, offset: int, device: torch.device) -> BlockMask:
    """The block mask of causal attention, cached because building it evaluates every pair."""
    return create_block_mask(lambda b, h, q, k: k <= q + offset, None, None, queries, keys, device=device)
