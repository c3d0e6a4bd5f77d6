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

from manyformer.core import PADDING, Place, Plain, tree_map
from manyformer.masks import Document, Heads, Mask
from manyformer.masks.base import both, pick
from manyformer.ops.cover import arrange, cover, span_of
from manyformer.ops.flex import compiled
from manyformer.ops.spelled import marked

BLOCK = 128
KINDS = 64
"""So many masks may be compiled in one process; torch's own limit of 8 is met by a model with growing windows."""

_REMEMBERED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def attend(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    mask: Mask,
    at: Place,
    of: Place,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax attention under `mask`, own segments only; a query that sees no key gets zeros."""
    blocks = block_mask(mask, at, of, q.shape[1])
    run: Any = compiled() if q.device.type == "cuda" else flex_attention
    with torch._dynamo.config.patch(recompile_limit=KINDS):
        y: Tensor = run(q, k, v, block_mask=blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y


def block_mask(mask: Mask, at: Place, of: Place, heads: int) -> BlockMask:
    """The blocks of 128 x 128 that may be visible, and those that are as a whole; remembered like plans."""
    if isinstance(at.layout, Plain) and isinstance(of.layout, Plain) and not marked(at, of):
        lengths = (at.pos.shape[1], of.pos.shape[1])
        return _plain(mask, heads, at.layout.start, of.layout.start, *lengths, at.pos.device)
    if at.seg is not of.seg:
        return _build(mask, at, of, heads)
    known = _REMEMBERED.setdefault(at.seg, {})  # type: ignore[no-untyped-call]
    name = (mask, heads, id(at.pos), id(at.role), id(at.part))
    if name not in known:
        # kept with them, so that nothing else can come to have their ids
        known[name] = (_build(mask, at, of, heads), at.pos, at.role, at.part)
    return known[name][0]  # type: ignore[no-any-return]


@lru_cache(maxsize=KINDS)
def _plain(mask: Mask, heads: int, start: int, first: int, queries: int, keys: int, device: torch.device) -> BlockMask:
    kinds = _by_kind(mask, heads)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return kinds(h, Place(q + start, torch.zeros_like(q)), Place(k + first, torch.zeros_like(k)))

    with torch.device("cpu"):
        at, of = (
            Place(torch.arange(begin, begin + length)[None], torch.zeros(1, length, dtype=torch.long))
            for begin, length in ((start, queries), (first, keys))
        )
    return _from_blocks(mask, at, of, heads, visible, device)


def _build(mask: Mask, at: Place, of: Place, heads: int) -> BlockMask:
    kinds = both(_by_kind(mask, heads), Document())

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        one, other = (pick(place, (b, index)) for place, index in ((at, q), (of, k)))
        return kinds(h, one, other) & (other.seg != PADDING)

    device = at.pos.device
    near = [tree_map(lambda field: field.cpu(), place) for place in (at, of)]
    return _from_blocks(mask, near[0], near[1], heads, visible, device)


def _by_kind(mask: Mask, heads: int) -> Mask:
    """The mask as a choice among those of single heads, which ask nothing of the head's number themselves."""
    kinds = [mask.head(head) for head in range(heads)]
    return kinds[0] if len(set(kinds)) == 1 else Heads(dict(enumerate(kinds)))


def _from_blocks(
    mask: Mask, at: Place, of: Place, heads: int, visible: Callable[..., Tensor], device: torch.device
) -> BlockMask:
    lengths = (at.pos.shape[1], of.pos.shape[1])
    counts = [-(-length // BLOCK) for length in lengths]
    alike = len({mask.head(head) for head in range(heads)}) == 1
    masks = [both(mask.head(head), Document()) for head in range(1 if alike else heads)]
    with torch.device("cpu"):
        pairs = [[_flags(one, pick(at, row), pick(of, row), counts) for one in masks] for row in range(len(at.pos))]
    some, full = (torch.stack([torch.stack([flags[kind] for flags in row]) for row in pairs]) for kind in (0, 1))
    (counts_some, some), (counts_full, full) = (_listed(flags.to(device)) for flags in (some, full))
    return BlockMask.from_kv_blocks(
        counts_some, some, counts_full, full, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=lengths
    )


def _flags(mask: Mask, at: Place, of: Place, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Which pairs of blocks are partly, and which wholly visible."""
    orders = [arrange(place, None, None, BLOCK) for place in (at, of)]
    found = cover(mask, *(span_of(place, order.blocks, mask.periods) for place, order in zip((at, of), orders)))
    # padding and what fills up the last block are for the inner mask to hide
    ragged = (found.columns + 1) * BLOCK > of.pos.shape[0]
    whole = found.full & ~ragged & (of.seg[orders[1].blocks] != PADDING).all(-1)[found.columns]
    some, full = (torch.zeros(*counts, dtype=torch.bool) for _ in range(2))
    some[found.rows, found.columns], full[found.rows, found.columns] = ~whole, whole
    return some, full


def _listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks of each row, and their numbers in front of all others."""
    return flags.sum(-1, dtype=torch.int32), (~flags).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32)
