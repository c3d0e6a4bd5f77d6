"""Layers with heads: gates on the outputs of heads, and the removal of heads."""

from manyformer.multi_head.hard_concrete import (
    GATES_FILE,
    GatesRecord,
    HardConcreteGates,
    attach_gates,
    fold_gates,
    read_gates,
)
from manyformer.multi_head.head_gates import (
    ConstantGates,
    HeadlessLayer,
    MultiHeadLayer,
    RemovedHeads,
    add_heads,
    attention_heads,
    format_heads,
    gated_heads,
    layers_of_part,
    parse_heads,
    part_name,
    remove_heads,
    subtract_heads,
)

__all__ = [
    "GATES_FILE",
    "ConstantGates",
    "GatesRecord",
    "HardConcreteGates",
    "HeadlessLayer",
    "MultiHeadLayer",
    "RemovedHeads",
    "add_heads",
    "attach_gates",
    "attention_heads",
    "fold_gates",
    "format_heads",
    "gated_heads",
    "layers_of_part",
    "parse_heads",
    "part_name",
    "read_gates",
    "remove_heads",
    "subtract_heads",
]
