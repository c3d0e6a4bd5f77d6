"""Any mask on CUDA: FlexAttention, given the blocks that the mask's own bounds leave, without a look at all pairs.

It compiles for each mask, as a whole or not at all: a call that cannot be compiled raises instead of running slowly. On
a CPU there is no gradient; there its eager form serves to test what it is given.
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
from manyformer.masks import Mask, PerHead, SameDocument
from manyformer.masks.mask import simplify_and, take_tokens
from manyformer.ops.block_cover import cover_blocks, order_into_blocks, span_of
from manyformer.ops.flex_bias_attention import compiled
from manyformer.ops.static_layout import has_roles_or_parts

BLOCK = 128
KINDS = 64
"""So many masks may be compiled in one process; torch's own limit of 8 is met by a model with growing windows."""

_REMEMBERED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def attend(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    mask: Mask,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax attention under `mask`, own segments only; a query that sees no key gets zeros."""
    blocks = block_mask(mask, query_positions, key_positions, q.shape[1])
    run: Any = compiled() if q.device.type == "cuda" else flex_attention
    with torch._dynamo.config.patch(recompile_limit=KINDS):
        y: Tensor = run(q, k, v, block_mask=blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y


def block_mask(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> BlockMask:
    """The blocks of 128 x 128 that may be visible, and those that are as a whole; remembered like plans."""
    if (
        isinstance(query_positions.layout, ContiguousLayout)
        and isinstance(key_positions.layout, ContiguousLayout)
        and not has_roles_or_parts(query_positions, key_positions)
    ):
        lengths = (query_positions.position_ids.shape[1], key_positions.position_ids.shape[1])
        return _plain(
            mask,
            heads,
            query_positions.layout.start,
            key_positions.layout.start,
            *lengths,
            query_positions.position_ids.device,
        )
    if query_positions.segment_ids is not key_positions.segment_ids:
        return _build(mask, query_positions, key_positions, heads)
    known = _REMEMBERED.setdefault(query_positions.segment_ids, {})  # type: ignore[no-untyped-call]
    name = (mask, heads, id(query_positions.position_ids), id(query_positions.roles), id(query_positions.part_ids))
    if name not in known:
        # kept with them, so that nothing else can come to have their ids
        known[name] = (
            _build(mask, query_positions, key_positions, heads),
            query_positions.position_ids,
            query_positions.roles,
            query_positions.part_ids,
        )
    return known[name][0]  # type: ignore[no-any-return]


@lru_cache(maxsize=KINDS)
def _plain(mask: Mask, heads: int, start: int, first: int, queries: int, keys: int, device: torch.device) -> BlockMask:
    kinds = _by_kind(mask, heads)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return kinds(h, TokenPositions(q + start, torch.zeros_like(q)), TokenPositions(k + first, torch.zeros_like(k)))

    with torch.device("cpu"):
        at, of = (
            TokenPositions(torch.arange(begin, begin + length)[None], torch.zeros(1, length, dtype=torch.long))
            for begin, length in ((start, queries), (first, keys))
        )
    return _from_blocks(mask, at, of, heads, visible, device)


def _build(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> BlockMask:
    kinds = simplify_and(_by_kind(mask, heads), SameDocument())

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        one, other = (take_tokens(place, (b, index)) for place, index in ((query_positions, q), (key_positions, k)))
        return kinds(h, one, other) & (other.segment_ids != PADDING_SEGMENT)

    device = query_positions.position_ids.device
    near = [tree_map(lambda field: field.cpu(), place) for place in (query_positions, key_positions)]
    return _from_blocks(mask, near[0], near[1], heads, visible, device)


def _by_kind(mask: Mask, heads: int) -> Mask:
    """The mask as a choice among those of single heads, which ask nothing of the head's number themselves."""
    kinds = [mask.for_head(head) for head in range(heads)]
    return kinds[0] if len(set(kinds)) == 1 else PerHead(dict(enumerate(kinds)))


def _from_blocks(
    mask: Mask,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    heads: int,
    visible: Callable[..., Tensor],
    device: torch.device,
) -> BlockMask:
    lengths = (query_positions.position_ids.shape[1], key_positions.position_ids.shape[1])
    counts = [-(-length // BLOCK) for length in lengths]
    alike = len({mask.for_head(head) for head in range(heads)}) == 1
    masks = [simplify_and(mask.for_head(head), SameDocument()) for head in range(1 if alike else heads)]
    with torch.device("cpu"):
        pairs = [
            [_flags(one, take_tokens(query_positions, row), take_tokens(key_positions, row), counts) for one in masks]
            for row in range(len(query_positions.position_ids))
        ]
    some, full = (torch.stack([torch.stack([flags[kind] for flags in row]) for row in pairs]) for kind in (0, 1))
    (counts_some, some), (counts_full, full) = (_listed(flags.to(device)) for flags in (some, full))
    return BlockMask.from_kv_blocks(
        counts_some, some, counts_full, full, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=lengths
    )


def _flags(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, counts: list[int]
) -> tuple[Tensor, Tensor]:
    """Which pairs of blocks are partly, and which wholly visible."""
    orders = [order_into_blocks(place, None, None, BLOCK) for place in (query_positions, key_positions)]
    found = cover_blocks(
        mask,
        *(span_of(place, order.blocks, mask.periods) for place, order in zip((query_positions, key_positions), orders)),
    )
    # padding and what fills up the last block are for the inner mask to hide
    ragged = (found.columns + 1) * BLOCK > key_positions.position_ids.shape[0]
    whole = (
        found.full & ~ragged & (key_positions.segment_ids[orders[1].blocks] != PADDING_SEGMENT).all(-1)[found.columns]
    )
    some, full = (torch.zeros(*counts, dtype=torch.bool) for _ in range(2))
    some[found.rows, found.columns], full[found.rows, found.columns] = ~whole, whole
    return some, full


def _listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks of each row, and their numbers in front of all others."""
    return flags.sum(-1, dtype=torch.int32), (~flags).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32)
