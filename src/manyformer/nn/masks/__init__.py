"""Attention masks: immutable predicates on the positions of queries and keys, combined with `&`, `|` and `~`.

A mask has an evaluable repr, compares by content, and is independent of tensor shapes. It is called with the positions
of queries and keys, which broadcast against each other, so one definition serves full sequences, caches, memories and
gathers. Kernels always restrict attention to the query's segment as well.
"""

from manyformer.nn.masks.block_causal import BlockCausal
from manyformer.nn.masks.local import (
    Causal,
    Local2D,
    LocalBlocks,
    PermutedBlocks,
    RowsAbove2D,
    SameDocument,
    SamePart,
    Stride,
    Window,
)
from manyformer.nn.masks.mask import AllKeys, AndMask, Mask, NoKeys, NotMask, OrMask, union
from manyformer.nn.masks.paper_patterns import (
    MaskByLayer,
    PerHead,
    alternate_heads,
    alternate_layers,
    fixed_pattern,
    four_piece_pattern,
    growing_windows,
    prefix_lm,
    strided_pattern,
    symmetric_window,
)
from manyformer.nn.masks.random_blocks import DrawnBlocks, ListedBlocks, RandomBlocks
from manyformer.nn.masks.token_sets import (
    AtPositions,
    AttendsToAll,
    FirstTokens,
    GlobalTokens,
    PeriodicTokens,
    TokenSet,
    TokenUnion,
    VisibleToAll,
    WithRole,
)

__all__ = [
    "AllKeys",
    "AndMask",
    "AtPositions",
    "AttendsToAll",
    "BlockCausal",
    "Causal",
    "DrawnBlocks",
    "FirstTokens",
    "GlobalTokens",
    "ListedBlocks",
    "Local2D",
    "LocalBlocks",
    "Mask",
    "MaskByLayer",
    "NoKeys",
    "NotMask",
    "OrMask",
    "PerHead",
    "PeriodicTokens",
    "PermutedBlocks",
    "RandomBlocks",
    "RowsAbove2D",
    "SameDocument",
    "SamePart",
    "Stride",
    "TokenSet",
    "TokenUnion",
    "VisibleToAll",
    "Window",
    "WithRole",
    "alternate_heads",
    "alternate_layers",
    "fixed_pattern",
    "four_piece_pattern",
    "growing_windows",
    "prefix_lm",
    "strided_pattern",
    "symmetric_window",
    "union",
]
