"""The parts of `gpu.py`, in the order in which they are run: what matters most and takes least comes first."""

from collections.abc import Callable, Mapping

from gpu_parts import (
    attention_speed,
    compilation,
    contracts,
    correctness,
    decoding_speed,
    fla_paths,
    flex_paths,
    step_memory,
    step_speed,
)
from gpu_parts.outcome import Item, Setting

PARTS: Mapping[str, Callable[[Setting], dict[str, Item]]] = {
    "flex": flex_paths.items,
    "attention": attention_speed.items,
    "step": step_speed.items,
    "decode": decoding_speed.items,
    "fla": fla_paths.items,
    "memory": step_memory.items,
    "correct": correctness.items,
    "compile": compilation.items,
    "check": contracts.items,
}


def all_items(setting: Setting) -> dict[str, Item]:
    """Every item by `PART/NAME`."""
    return {f"{part}/{name}": item for part, items in PARTS.items() for name, item in items(setting).items()}
