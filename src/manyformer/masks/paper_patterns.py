"""Patterns of papers as expressions, and how they change from layer to layer."""

from collections.abc import Callable, Sequence

from manyformer.masks.block_masks import LocalBlocks
from manyformer.masks.local import Causal, Stride, Window
from manyformer.masks.mask import AllKeys, Mask, NotMask, simplify_and
from manyformer.masks.per_head import PerHead
from manyformer.masks.token_sets import AttendsToAll, PeriodicTokens, TokenSet, VisibleToAll

MaskByLayer = Callable[[int], Mask]
"""The mask of each layer by its number, counted from 0 at the bottom."""


def symmetric_window(reach: int, *, dilation: int = 1) -> Window:
    """A window that sees `reach` positions to either side."""
    return Window(reach + 1, ahead=reach, dilation=dilation)


def prefix_lm(tokens: TokenSet) -> Mask:
    """The past, and all of a prefix even before it (Liu et al. 2018, arXiv:1801.10198; Raffel et al. 2020)."""
    return Causal() | VisibleToAll(tokens)


def strided_pattern(stride: int) -> tuple[Mask, Mask]:
    """The last `stride` positions, and every `stride`-th one (Child et al. 2019, arXiv:1904.10509, section 4.2).

    The window is that of the released code, one narrower than the paper's; the union is the same.
    """
    return Window(stride), simplify_and(Causal(), Stride(stride))


def fixed_pattern(stride: int, summary: int, *, verse: int = 0) -> tuple[Mask, Mask]:
    """The own block, and the last `summary` positions of each block (Child et al. 2019, section 4.2).

    Other heads may take other parts of a block: number `verse`, counted from its end.
    """
    if not 0 < summary * (verse + 1) <= stride:
        raise ValueError(f"fixed: {summary} summary positions, number {verse} from the end, exceed a block of {stride}")
    end = stride - verse * summary
    return simplify_and(Causal(), LocalBlocks(stride)), simplify_and(
        Causal(), VisibleToAll(PeriodicTokens(stride, end - summary, end))
    )


def four_piece_pattern(
    tokens: TokenSet, *, g2g: Mask | None = None, g2l: Mask | None = None, l2g: Mask | None = None, l2l: Mask
) -> Mask:
    """Attention in four directions between global `tokens` and the rest (Ainslie et al. 2020, arXiv:2004.08483).

    Each piece has a mask of its own; left out, it sees everything.
    """
    by, to = AttendsToAll(tokens), VisibleToAll(tokens)
    ends = ((by, to, g2g), (by, NotMask(to), g2l), (NotMask(by), to, l2g), (NotMask(by), NotMask(to), l2l))
    parts = [simplify_and(simplify_and(start, end), AllKeys() if mask is None else mask) for start, end, mask in ends]
    return parts[3] | parts[2] | parts[1] | parts[0]


def union(masks: Sequence[Mask]) -> Mask:
    """What any of them allows: several patterns in one head (Child et al. 2019, section 4.3, "merged")."""
    seen, *more = masks
    for mask in more:
        seen = seen | mask
    return seen


def alternate_heads(masks: Sequence[Mask], heads: int) -> Mask:
    """The patterns dealt out to the heads in turn (Child et al. 2019, section 4.3, per head)."""
    return PerHead({head: masks[head % len(masks)] for head in range(heads)})


def alternate_layers(masks: Sequence[Mask]) -> MaskByLayer:
    """The patterns taken in turn by the layers (Child et al. 2019, section 4.3)."""
    return lambda layer: masks[layer % len(masks)]


def growing_windows(depth: int, lowest: int, highest: int) -> Callable[[int], int]:
    """Window sizes that grow geometrically from the bottom layer to the top one (Beltagy et al. 2020, section 4.1)."""
    if min(depth, lowest, highest) < 1:
        raise ValueError(f"growing: depth ({depth}), lowest ({lowest}) and highest ({highest}) must be at least 1")
    return lambda layer: round(lowest * (highest / lowest) ** (layer / max(depth - 1, 1)))
