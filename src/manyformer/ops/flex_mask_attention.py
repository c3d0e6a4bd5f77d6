"""FlexAttention on CUDA under any mask, with block masks derived from the mask's bounds instead of all pairs.

It is compiled for each mask with `fullgraph`: a call that cannot be compiled raises instead of running slowly. On a CPU
there is no gradient; the eager form is used there to test the block masks.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.weak import WeakIdKeyDictionary

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, TokenPositions, tree_map
from manyformer.costs import COSTS
from manyformer.masks import Mask, PerHead, SameDocument
from manyformer.masks.mask import simplify_and, take_tokens
from manyformer.ops.block_cover import block_bounds, cover_blocks, order_into_blocks
from manyformer.ops.flex_bias_attention import compiled_flex_attention
from manyformer.ops.static_layout import has_roles_or_parts

BLOCK = COSTS.flex_block
MAX_COMPILED_MASKS = COSTS.max_compiled_masks

_BLOCK_MASKS: WeakIdKeyDictionary = WeakIdKeyDictionary()


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
    flex: Any = compiled_flex_attention() if q.device.type == "cuda" else flex_attention
    with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED_MASKS):
        y: Tensor = flex(q, k, v, block_mask=blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y


def block_mask(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> BlockMask:
    """The 128 x 128 blocks that are partly visible and those that are fully visible; cached like plans."""
    if (
        isinstance(query_positions.layout, ContiguousLayout)
        and isinstance(key_positions.layout, ContiguousLayout)
        and not has_roles_or_parts(query_positions, key_positions)
    ):
        lengths = (query_positions.position_ids.shape[1], key_positions.position_ids.shape[1])
        return _contiguous_block_mask(
            mask,
            heads,
            query_positions.layout.start,
            key_positions.layout.start,
            *lengths,
            query_positions.position_ids.device,
        )
    if query_positions.segment_ids is not key_positions.segment_ids:
        return _build_block_mask(mask, query_positions, key_positions, heads)
    cached = _BLOCK_MASKS.setdefault(query_positions.segment_ids, {})  # type: ignore[no-untyped-call]
    key = (mask, heads, id(query_positions.position_ids), id(query_positions.roles), id(query_positions.part_ids))
    if key not in cached:
        # stored with the tensors, so that their ids cannot be reused
        cached[key] = (
            _build_block_mask(mask, query_positions, key_positions, heads),
            query_positions.position_ids,
            query_positions.roles,
            query_positions.part_ids,
        )
    return cached[key][0]  # type: ignore[no-any-return]


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
        query_positions, key_positions = (
            TokenPositions(
                torch.arange(start_position, start_position + length)[None], torch.zeros(1, length, dtype=torch.long)
            )
            for start_position, length in ((query_start, queries), (key_start, keys))
        )
    return _assemble_block_mask(mask, query_positions, key_positions, heads, mask_mod, device)


def _build_block_mask(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int
) -> BlockMask:
    head_mask = simplify_and(_per_head_mask(mask, heads), SameDocument())

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query, key = (
            take_tokens(positions, (b, index)) for positions, index in ((query_positions, q), (key_positions, k))
        )
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
        flags_per_row = [
            [
                _block_flags(head_mask, take_tokens(query_positions, row), take_tokens(key_positions, row), counts)
                for head_mask in masks
            ]
            for row in range(len(query_positions.position_ids))
        ]
    partial, full = (
        torch.stack([torch.stack([flags[kind] for flags in row]) for row in flags_per_row]) for kind in (0, 1)
    )
    (partial_counts, partial), (full_counts, full) = (_list_blocks(flags.to(device)) for flags in (partial, full))
    return BlockMask.from_kv_blocks(
        partial_counts, partial, full_counts, full, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths
    )


def _block_flags(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, counts: list[int]
) -> tuple[Tensor, Tensor]:
    """Boolean matrices of the partly and of the fully visible block pairs."""
    orders = [order_into_blocks(positions, None, None, BLOCK) for positions in (query_positions, key_positions)]
    cover = cover_blocks(
        mask,
        *(
            block_bounds(positions, order.blocks, mask.periods)
            for positions, order in zip((query_positions, key_positions), orders)
        ),
    )
    # blocks with padding tokens or a ragged end need the inner mask
    is_ragged = (cover.columns + 1) * BLOCK > key_positions.position_ids.shape[0]
    is_full = (
        cover.full
        & ~is_ragged
        & (key_positions.segment_ids[orders[1].blocks] != PADDING_SEGMENT).all(-1)[cover.columns]
    )
    partial, full = (torch.zeros(*counts, dtype=torch.bool) for _ in range(2))
    partial[cover.rows, cover.columns], full[cover.rows, cover.columns] = ~is_full, is_full
    return partial, full


def _list_blocks(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Number of marked blocks per row, and block indices with the marked ones first."""
    return flags.sum(-1, dtype=torch.int32), (~flags).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32)
