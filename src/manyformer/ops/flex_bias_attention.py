"""Softmax attention with a term for each distance, by FlexAttention: for CUDA, where it compiles to one fused kernel.

On a CPU FlexAttention has no gradient; its eager form is used there to test the functions passed to it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from manyformer.masks import Causal
from manyformer.ops.flex_block_mask import BLOCK, MAX_COMPILED_MASKS, contiguous_block_mask
from manyformer.ops.toeplitz_attention import QueryOffset
from manyformer.system.devices import compiles_attention
from manyformer.torch_internals import compile_up_to

SCORE_KERNEL_OPTIONS = {"num_stages": 2}
"""With three stages, the kernel's choice on Hopper, the terms that are read ahead do not fit into shared memory."""

CAUSAL = Causal()

MIN_FLEX_WIDTH = 16
"""The fewest channels of keys and of values that the compiled kernel of torch 2.11 to 2.13 computes."""

MIN_FLEX_QUERIES = BLOCK
"""With fewer queries there is a single row of blocks, whose list the host makes in more time than it saves."""


def has_few_queries(q: Float[Tensor, "b h l e"]) -> bool:
    """Whether a GPU computes all pairs of these queries, such as that of a decoded token, without FlexAttention."""
    return compiles_attention(q.device) and q.shape[2] < MIN_FLEX_QUERIES


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
    blocks = None
    if query_offset.causal:
        starts = (query_offset.offset, 0)
        lengths = (q.shape[2], k.shape[2])
        blocks = contiguous_block_mask(CAUSAL, q.shape[1], starts, lengths, q.device)
    modify_score = score_mod(terms.expand(-1, q.shape[1], -1, -1), back, ahead, query_offset.offset)
    return fused_flex_attention(q, k, v, score_mod=modify_score, block_mask=blocks, scale=scale)


def score_mod(terms: Float[Tensor, "#b h #l r"], back: int, ahead: int, offset: int) -> Callable[..., Tensor]:
    """A FlexAttention `score_mod` that adds the term for the pair's distance."""
    if terms.shape[0] == terms.shape[2] == 1:
        shared_terms = terms[0, :, 0]
        return lambda score, b, h, q, k: score + shared_terms[h, (k - q - offset).clamp(-back, ahead) + back]
    return lambda score, b, h, q, k: score + terms[b, h, q, (k - q - offset).clamp(-back, ahead) + back]


def fused_flex_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    *,
    block_mask: BlockMask | None,
    scale: float,
    score_mod: Callable[..., Tensor] | None = None,
) -> Float[Tensor, "b h l f"]:
    """FlexAttention as one kernel for each mask and score function where the device has such; else by its definition.

    It is compiled with `fullgraph`: without it one graph break makes all later calls slow, silently. Inside a step that
    is being compiled the definition is traced, and becomes the kernel there."""
    options: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale}
    if q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True
    if score_mod is not None:
        options["kernel_options"] = SCORE_KERNEL_OPTIONS
    if not compiles_attention(q.device) or torch.compiler.is_compiling():
        y: Tensor = flex_attention(q, k, v, **options)
        return y
    with compile_up_to(MAX_COMPILED_MASKS):
        kernel: Any = _compiled_flex_attention()
        y = kernel(q, k, v, **options)
    return y


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, fullgraph=True)
