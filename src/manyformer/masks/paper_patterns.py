"""Sparse attention patterns of papers as mask expressions, and schedules over layers and heads."""

from collections.abc import Callable, Sequence

from manyformer.masks.block_masks import LocalBlocks
from manyformer.masks.local import Causal, Stride, Window
from manyformer.masks.mask import AllKeys, Mask, NotMask, simplify_and
from manyformer.masks.per_head import PerHead
from manyformer.masks.token_sets import AttendsToAll, PeriodicTokens, TokenSet, VisibleToAll

MaskByLayer = Callable[[int], Mask]
"""A function from the layer index, counted from 0 at the bottom, to the layer's mask."""


def symmetric_window(radius: int, *, dilation: int = 1) -> Window:
    """A window of `radius` positions on either side."""
    return Window(radius + 1, lookahead=radius, dilation=dilation)


def prefix_lm(tokens: TokenSet) -> Mask:
    """A causal mask in which all queries see the prefix (Liu et al. 2018, arXiv:1801.10198; Raffel et al. 2020)."""
    return Causal() | VisibleToAll(tokens)


def strided_pattern(stride: int) -> tuple[Mask, Mask]:
    """The last `stride` positions, and every `stride`-th position (Child et al. 2019, arXiv:1904.10509, section 4.2).

    The window is that of the released code, one narrower than the paper's; the union of both masks is the same.
    """
    return Window(stride), simplify_and(Causal(), Stride(stride))


def fixed_pattern(stride: int, summary: int, *, part_index: int = 0) -> tuple[Mask, Mask]:
    """The query's block, and the last `summary` positions of each block (Child et al. 2019, section 4.2).

    Heads may use different parts of a block: `part_index` counts parts of `summary` positions from its end.
    """
    if not 0 < summary * (part_index + 1) <= stride:
        raise ValueError(
            f"fixed_pattern: {summary} summary positions, part {part_index} from the end, exceed a block of {stride}"
        )
    stop = stride - part_index * summary
    return simplify_and(Causal(), LocalBlocks(stride)), simplify_and(
        Causal(), VisibleToAll(PeriodicTokens(stride, stop - summary, stop))
    )


def four_piece_pattern(
    tokens: TokenSet, *, g2g: Mask | None = None, g2l: Mask | None = None, l2g: Mask | None = None, l2l: Mask
) -> Mask:
    """A mask of four pieces, between global `tokens` and all others (Ainslie et al. 2020, arXiv:2004.08483).

    `g2l` is for global queries and local keys, and so on; None allows all pairs of that piece.
    """
    from_global = AttendsToAll(tokens)
    to_global = VisibleToAll(tokens)
    pieces = (
        (from_global, to_global, g2g),
        (from_global, NotMask(to_global), g2l),
        (NotMask(from_global), to_global, l2g),
        (NotMask(from_global), NotMask(to_global), l2l),
    )
    masks = [simplify_and(simplify_and(start, end), AllKeys() if mask is None else mask) for start, end, mask in pieces]
    return masks[3] | masks[2] | masks[1] | masks[0]


def union(masks: Sequence[Mask]) -> Mask:
    """The union of several patterns, for use in one head (Child et al. 2019, section 4.3, "merged")."""
    result, *operands = masks
    for mask in operands:
        result = result | mask
    return result


def alternate_heads(masks: Sequence[Mask], heads: int) -> Mask:
    """The patterns assigned to the heads cyclically (Child et al. 2019, section 4.3, per head)."""
    return PerHead({head: masks[head % len(masks)] for head in range(heads)})


def alternate_layers(masks: Sequence[Mask]) -> MaskByLayer:
    """The patterns assigned to the layers cyclically (Child et al. 2019, section 4.3)."""
    return lambda layer: masks[layer % len(masks)]


def growing_windows(depth: int, bottom: int, top: int) -> Callable[[int], int]:
    """Window sizes that grow geometrically from the bottom layer to the top one (Beltagy et al. 2020, section 4.1)."""
    if min(depth, bottom, top) < 1:
        raise ValueError(f"growing_windows: depth ({depth}), bottom ({bottom}) and top ({top}) must be at least 1")
    return lambda layer: round(bottom * (top / bottom) ** (layer / max(depth - 1, 1)))
