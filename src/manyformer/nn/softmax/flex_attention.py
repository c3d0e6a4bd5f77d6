"""Softmax attention by FlexAttention, for CUDA, where each mask or term for distances compiles to one fused kernel.

A call that cannot be compiled with `fullgraph` raises instead of running slowly. On a CPU FlexAttention has no
gradient; its eager form is used there to test masks and terms. Block masks come from the bounds of masks, never from
all pairs, by operations on the device of the tokens, which the host neither reads nor waits for, and which a graph that
is being compiled can contain.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, TokenPositions, tree_map
from manyformer.nn.masks.local import Causal, SameDocument
from manyformer.nn.masks.mask import Mask, TokenBounds
from manyformer.nn.ops.static_layout import cache_by_tokens, has_roles_or_parts, materialize
from manyformer.nn.runtime.devices import compiles_attention
from manyformer.nn.runtime.torch_internals import compile_up_to
from manyformer.nn.softmax.block_cover import block_bounds
from manyformer.nn.softmax.toeplitz_attention import QueryOffset

BLOCK = 128
"""Block size of the compiled kernel."""

IN_DOCUMENT = SameDocument()

CAUSAL = Causal()

UNREACHED = 1 << 40
"""A segment or position beyond all others."""

MAX_COMPILED_MASKS = 64
"""Masks and score functions that may be compiled in one process, and block masks of contiguous rows that are kept."""

SCORE_KERNEL_OPTIONS = {"num_stages": 2}
"""With three stages, the kernel's choice on Hopper, the terms that are read ahead do not fit into shared memory."""

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


def block_mask(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> BlockMask:
    """The 128 x 128 blocks that are partly visible and those that are fully visible; cached like plans."""
    query_layout = query_positions.layout
    key_layout = key_positions.layout
    if (
        isinstance(query_layout, ContiguousLayout)
        and isinstance(key_layout, ContiguousLayout)
        and not has_roles_or_parts(query_positions, key_positions)
    ):
        starts = query_layout.start, key_layout.start
        lengths = query_positions.position_ids.shape[1], key_positions.position_ids.shape[1]
        return contiguous_block_mask(mask, heads, starts, lengths, query_positions.position_ids.device)
    return _token_block_mask(mask, query_positions, key_positions, heads)


def contiguous_block_mask(
    mask: Mask, heads: int, starts: tuple[int, int], lengths: tuple[int, int], device: torch.device
) -> BlockMask:
    """The block mask of queries and keys at contiguous positions of one document, which begin at `starts`."""
    if torch.compiler.is_compiling():
        return _make_contiguous(mask, heads, starts, lengths, device)
    # outside inference mode, whose tensors could not be used in training later
    with torch.inference_mode(mode=False):
        return _kept_contiguous(mask, heads, starts, lengths, device)


def _make_contiguous(
    mask: Mask, heads: int, starts: tuple[int, int], lengths: tuple[int, int], device: torch.device
) -> BlockMask:
    query_start, key_start = starts

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query = TokenPositions(q + query_start, torch.zeros_like(q))
        return _visible(mask, heads, h, query, TokenPositions(k + key_start, torch.zeros_like(k)))

    queries = materialize(ContiguousLayout(query_start), lengths[0], device)
    keys = materialize(ContiguousLayout(key_start), lengths[1], device)
    return _assemble_block_mask(mask, heads, queries, keys, mask_mod)


_kept_contiguous = lru_cache(maxsize=MAX_COMPILED_MASKS)(_make_contiguous)


@cache_by_tokens
def _token_block_mask(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int
) -> BlockMask:
    """The block mask of tokens whose positions and documents only tensors know."""
    queries = _seen_by_masks(query_positions)
    keys = _seen_by_masks(key_positions)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query = _token_at(queries, b, q)
        key = _token_at(keys, b, k)
        same_document = (query.segment_ids == key.segment_ids) & (key.segment_ids != PADDING_SEGMENT)
        return same_document & _visible(mask, heads, h, query, key)

    return _assemble_block_mask(mask, heads, queries, keys, mask_mod)


def _seen_by_masks(positions: TokenPositions) -> TokenPositions:
    """What masks may depend on, without what only attention reads."""
    return TokenPositions(
        positions.position_ids, positions.segment_ids, roles=positions.roles, part_ids=positions.part_ids
    )


def _token_at(positions: TokenPositions, row: Tensor, column: Tensor) -> TokenPositions:
    """One token; a single row of positions holds for all rows."""

    def entry(field: Tensor | None) -> Tensor | None:
        if field is None:
            return None
        return field[row if field.shape[0] > 1 else torch.zeros_like(row), column]

    position_ids = entry(positions.position_ids)
    segment_ids = entry(positions.segment_ids)
    assert position_ids is not None
    assert segment_ids is not None
    return TokenPositions(position_ids, segment_ids, roles=entry(positions.roles), part_ids=entry(positions.part_ids))


def _visible(mask: Mask, heads: int, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
    """Whether a pair is visible in head `h`, which the host does not read."""
    if not mask.reads_head:
        return mask(h, q, k)
    visible = mask.in_head(0, q, k)
    for head in range(1, heads):
        visible = torch.where(h == head, mask.in_head(head, q, k), visible)
    return visible


def _assemble_block_mask(
    mask: Mask,
    heads: int,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    mask_mod: Callable[..., Tensor],
) -> BlockMask:
    q, k = (_bounds_of_blocks(positions, mask.periods) for positions in (query_positions, key_positions))
    # every block of queries meets every block of keys
    q = q.select((..., None))
    k = k.select((..., None, slice(None)))
    pair = q.in_shared_documents(k), k.in_shared_documents(q)
    in_document = IN_DOCUMENT.bounds(*pair)
    by_head = [mask.bounds_in_head(head, *pair).both(in_document) for head in range(heads if mask.per_head else 1)]
    visible, full = (torch.stack(flags, dim=1) for flags in zip(*by_head))
    # blocks with padding or with a ragged end need the mask of their pairs
    keys = key_positions.position_ids.shape[1]
    is_whole = torch.arange(full.shape[-1], device=full.device) < keys // BLOCK
    full = visible & full & (is_whole & ~q.has_padding & ~k.has_padding)[:, None]
    partial = visible & ~full
    # the lists of both sides come from the flags: `from_kv_blocks` would make flags of lists again
    return BlockMask(
        (query_positions.position_ids.shape[1], keys),
        *_list_blocks(partial),
        *_list_blocks(full),
        *_list_blocks(partial.mT),
        *_list_blocks(full.mT),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_mod,
    )


class BlockBounds(NamedTuple):
    """Bounds of the tokens of each block; those of segments leave padding out, which no token sees.

    `lowest` and `highest` are bounds of the positions in the first and in the last document of a block: where only the
    end of a document or the beginning of one is shared with another block, the positions of others say nothing."""

    tokens: TokenBounds
    lowest: tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]
    highest: tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]
    has_padding: Bool[Tensor, "*n"]

    def select(self, index: Any) -> "BlockBounds":
        """The blocks at `index`."""
        return BlockBounds(*tree_map(lambda bound: bound[index], tuple(self)))

    def in_shared_documents(self, right: "BlockBounds") -> TokenBounds:
        """Bounds of the tokens whose document may have tokens in the other block, too."""
        low, high = self.tokens.segments
        other_low, other_high = right.tokens.segments
        # tokens of other documents in a block say nothing about the pairs of a shared one
        first, last = (
            torch.where(other_high == low, of_lowest, torch.where(other_low == high, of_highest, of_all))
            for of_all, of_lowest, of_highest in zip(self.tokens[:2], self.lowest, self.highest, strict=True)
        )
        return self.tokens._replace(first=first, last=last)


def _bounds_of_blocks(positions: TokenPositions, periods: frozenset[int]) -> BlockBounds:
    """Bounds of each block of each row; the last one may be shorter."""
    length = positions.position_ids.shape[1]
    device = positions.position_ids.device
    padded = -(-length // BLOCK) * BLOCK
    # the last block is filled up with its last token, which moves no bound
    index = torch.arange(padded, device=device).clamp(max=length - 1).view(-1, BLOCK)
    segment_ids = positions.segment_ids[:, index]
    position_ids = positions.position_ids[:, index]
    is_padding = segment_ids == PADDING_SEGMENT
    lowest = segment_ids.masked_fill(is_padding, UNREACHED).amin(-1)
    highest = segment_ids.amax(-1)
    ends = []
    for end in (lowest, highest):
        is_elsewhere = segment_ids != end[..., None]
        first = position_ids.masked_fill(is_elsewhere, UNREACHED).amin(-1)
        ends.append((first, position_ids.masked_fill(is_elsewhere, -1).amax(-1)))
    tokens = block_bounds(positions, index, periods)._replace(segments=(lowest, highest))
    return BlockBounds(tokens, ends[0], ends[1], is_padding.any(-1))


def _list_blocks(flags: Bool[Tensor, "b h n m"]) -> tuple[Int[Tensor, "b h n"], Int[Tensor, "b h n m"]]:
    """Number of marked blocks per row, and block indices with the marked ones first."""
    # the kernel reads as many indices of a row as it has blocks; those after them are never read
    return flags.sum(-1, dtype=torch.int32), (~flags).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32)
