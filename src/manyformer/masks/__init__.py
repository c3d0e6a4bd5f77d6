"""Who may look at whom: frozen predicates on places, with an algebra `&`, `|`, `~`.

A mask is a value: it prints as it reads, compares by content, and knows nothing of tensor shapes. It is asked with the
places of queries and keys, which broadcast against each other, so one definition serves full sequences, caches,
memories and gathers. Kernels always add the rule that a token sees its own segment only.
"""

from manyformer.masks.base import And, Everything, Mask, Not, Nothing, Or
from manyformer.masks.blocks import Above2D, Blocks, Local2D, Permuted
from manyformer.masks.heads import Heads
from manyformer.masks.local import Causal, Document, Part, Stride, Window
from manyformer.masks.patterns import (
    Schedule,
    around,
    by_head,
    fixed,
    growing,
    interleaved,
    pieces,
    prefix,
    strided,
    union,
)
from manyformer.masks.random import Listed, RandomBlocks
from manyformer.masks.tokens import By, Columns, Either, First, Global, Positions, Role, To, Tokens

__all__ = [
    "Above2D",
    "And",
    "Blocks",
    "By",
    "Causal",
    "Columns",
    "Document",
    "Either",
    "Everything",
    "First",
    "Global",
    "Heads",
    "Listed",
    "Local2D",
    "Mask",
    "Not",
    "Nothing",
    "Or",
    "Part",
    "Permuted",
    "Positions",
    "RandomBlocks",
    "Role",
    "Schedule",
    "Stride",
    "To",
    "Tokens",
    "Window",
    "around",
    "by_head",
    "fixed",
    "growing",
    "interleaved",
    "pieces",
    "prefix",
    "strided",
    "union",
]
