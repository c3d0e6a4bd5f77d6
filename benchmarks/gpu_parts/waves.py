"""The waves of `gpu.py`: what belongs together, in the order in which it matters, each within minutes."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpu_parts import (
    attention_speed,
    code_generation,
    compilation,
    contracts,
    correctness,
    decoding_speed,
    device_costs,
    figures,
    fla_paths,
    flex_paths,
    generated_tokens,
    host_time,
    step_memory,
    step_speed,
    verbs,
    waits,
)
from gpu_parts.outcome import Item, Setting

PARTS: Mapping[str, Callable[[Setting], dict[str, Item]]] = {
    "correct": correctness.single_items,
    "generate": generated_tokens.items,
    "flex": flex_paths.items,
    "verbs": verbs.items,
    "half": correctness.half_items,
    "code": code_generation.items,
    "fla": fla_paths.items,
    "waits": waits.items,
    "compile": compilation.items,
    "step": step_speed.items,
    "host": host_time.items,
    "decode": decoding_speed.items,
    "attention": attention_speed.items,
    "fla speed": fla_paths.speed_items,
    "memory": step_memory.items,
    "check": contracts.items,
    "costs": device_costs.items,
    "figures": figures.items,
}
"""Every part by name; an item is called `PART/NAME`."""


class Wave(NamedTuple):
    """Parts that are run together."""

    purpose: str
    parts: Sequence[str]
    side_by_side: int
    """How many items share the device at a time: comparisons may, timings are alone."""
    item_seconds: float
    """The most that an item may take."""


WAVES: Mapping[int, Wave] = {
    1: Wave(
        "every recipe against the CPU in float32, decoding, FlexAttention", ("correct", "generate", "flex"), 12, 100
    ),
    2: Wave(
        "verbs, bfloat16, compilation, fla-core, waits", ("verbs", "fla", "waits", "code", "half", "compile"), 12, 150
    ),
    3: Wave("speed and memory", ("step", "host", "decode", "attention", "fla speed", "memory"), 1, 90),
    4: Wave("contracts on the device, and its costs", ("check", "costs"), 12, 120),
    5: Wave("published figures", ("figures",), 2, 340),
}


def all_items(setting: Setting) -> dict[str, Item]:
    """Every item by `PART/NAME`."""
    return {f"{part}/{name}": item for part, items in PARTS.items() for name, item in items(setting).items()}


def names_of(wave: Wave, setting: Setting) -> list[str]:
    """The items of a wave in order."""
    return [f"{part}/{name}" for part in wave.parts for name in PARTS[part](setting)]
