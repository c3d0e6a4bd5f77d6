"""FlexAttention on CUDA under any mask, with block masks derived from the mask's bounds instead of all pairs.

It is compiled for each mask with `fullgraph`: a call that cannot be compiled raises instead of running slowly. On a CPU
there is no gradient; the eager form is used there to test the block masks.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, TokenPositions, tree_map
from manyformer.costs.cost_model import COSTS
from manyformer.masks import Mask, PerHead, SameDocument
from manyformer.masks.mask import simplify_and, take_tokens
from manyformer.ops.block_cover import block_bounds, cover_blocks, order_into_blocks
from manyformer.ops.flex_bias_attention import MAX_COMPILED_MASKS, fused_flex_attention
from manyformer.ops.static_layout import cache_by_tokens, has_roles_or_parts, materialize

BLOCK = COSTS.flex_block


def flex_mask_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    mask: Mask,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax attention under `mask` within segments; a query that sees no key gets zeros."""
    blocks = block_mask(mask, query_positions, key_positions, q.shape[1])
    return fused_flex_attention(q, k, v, block_mask=blocks, scale=scale)


def block_mask(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> BlockMask:
    """The 128 x 128 blocks that are partly visible and those that are fully visible; cached like plans."""
    query_layout, key_layout = query_positions.layout, key_positions.layout
    if (
        isinstance(query_layout, ContiguousLayout)
        and isinstance(key_layout, ContiguousLayout)
        and not has_roles_or_parts(query_positions, key_positions)
    ):
        lengths = (query_positions.position_ids.shape[1], key_positions.position_ids.shape[1])
        device = query_positions.position_ids.device
        return _contiguous_block_mask(mask, heads, query_layout.start, key_layout.start, *lengths, device)
    return _build_block_mask(mask, query_positions, key_positions, heads)


@lru_cache(maxsize=MAX_COMPILED_MASKS)
def _contiguous_block_mask(
    mask: Mask, heads: int, query_start: int, key_start: int, queries: int, keys: int, device: torch.device
) -> BlockMask:
    head_mask = _per_head_mask(mask, heads)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return head_mask(
            h, TokenPositions(q + query_start, torch.zeros_like(q)), TokenPositions(k + key_start, torch.zeros_like(k))
        )

    with torch.device("cpu"):
        query_positions = materialize(ContiguousLayout(query_start), queries)
        key_positions = materialize(ContiguousLayout(key_start), keys)
    return _assemble_block_mask(mask, query_positions, key_positions, heads, mask_mod, device)


@cache_by_tokens
def _build_block_mask(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int
) -> BlockMask:
    head_mask = simplify_and(_per_head_mask(mask, heads), SameDocument())

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query, key = take_tokens(query_positions, (b, q)), take_tokens(key_positions, (b, k))
        return head_mask(h, query, key) & (key.segment_ids != PADDING_SEGMENT)

    device = query_positions.position_ids.device
    on_cpu = [tree_map(lambda field: field.cpu(), positions) for positions in (query_positions, key_positions)]
    return _assemble_block_mask(mask, on_cpu[0], on_cpu[1], heads, mask_mod, device)


def _per_head_mask(mask: Mask, heads: int) -> Mask:
    """The mask as a `PerHead` of masks that do not depend on the head, or one mask where all are equal."""
    masks = [mask.for_head(head) for head in range(heads)]
    return masks[0] if len(set(masks)) == 1 else PerHead(dict(enumerate(masks)))


def _assemble_block_mask(
    mask: Mask,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    heads: int,
    mask_mod: Callable[..., Tensor],
    device: torch.device,
) -> BlockMask:
    lengths = (query_positions.position_ids.shape[1], key_positions.position_ids.shape[1])
    counts = [-(-length // BLOCK) for length in lengths]
    is_uniform = len({mask.for_head(head) for head in range(heads)}) == 1
    masks = [simplify_and(mask.for_head(head), SameDocument()) for head in range(1 if is_uniform else heads)]
    with torch.device("cpu"):
        flags = [
            _block_flags(head_mask, take_tokens(query_positions, row), take_tokens(key_positions, row), counts)
            for row in range(len(query_positions.position_ids))
            for head_mask in masks
        ]
    by_row = (torch.stack(kind).view(-1, len(masks), *counts) for kind in zip(*flags))
    (partial_counts, partial), (full_counts, full) = (_list_blocks(kind.to(device)) for kind in by_row)
    return BlockMask.from_kv_blocks(
        partial_counts, partial, full_counts, full, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths
    )


def _block_flags(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, counts: list[int]
) -> tuple[Tensor, Tensor]:
    """Boolean matrices of the partly and of the fully visible block pairs."""
    q, k = (order_into_blocks(positions, None, None, BLOCK).blocks for positions in (query_positions, key_positions))
    bounds = block_bounds(query_positions, q, mask.periods), block_bounds(key_positions, k, mask.periods)
    cover = cover_blocks(mask, *bounds)
    # blocks with padding tokens or a ragged end need the inner mask
    is_ragged = (cover.columns + 1) * BLOCK > key_positions.position_ids.shape[0]
    has_padding = (key_positions.segment_ids[k] == PADDING_SEGMENT).any(-1)[cover.columns]
    is_full = cover.full & ~is_ragged & ~has_padding
    partial, full = (torch.zeros(*counts, dtype=torch.bool) for _ in range(2))
    partial[cover.rows, cover.columns], full[cover.rows, cover.columns] = ~is_full, is_full
    return partial, full


def _list_blocks(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Number of marked blocks per row, and block indices with the marked ones first."""
    return flags.sum(-1, dtype=torch.int32), (~flags).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32)
