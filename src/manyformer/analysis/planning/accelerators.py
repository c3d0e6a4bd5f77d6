"""Kinds of accelerators with their memory and speed, and quantities as people write them (`1.3B`).

Nothing here needs torch."""

import re
from typing import NamedTuple

from manyformer.base.errors import UserError

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([kmbt]?)", re.IGNORECASE)
MAX_QUANTITY = 1e15


class Accelerator(NamedTuple):
    """One kind of accelerator: its memory, its dense bfloat16 matrix products, and the bandwidth of its memory.

    `pattern` matches the name under which torch reports it.
    """

    name: str
    pattern: str
    memory: float
    """Bytes."""
    flops: float
    """Floating-point operations a second in bfloat16 without sparsity, summed in float32; a multiply-add is two."""
    bandwidth: float
    """Bytes a second."""


_ROWS = (
    # name, pattern, GB, TFLOP/s, GB/s: from the data sheets of NVIDIA and AMD
    ("b200", r"\bG?B200\b", 192, 2250, 8000),
    ("h200", r"\bG?H200\b", 141, 989, 4800),
    ("h100-pcie", r"\bH100 PCIe", 80, 756, 2000),
    ("h100", r"\bH100\b", 80, 989, 3350),
    ("a100-40gb", r"\bA100.*40GB", 40, 312, 1555),
    ("a100", r"\bA100\b", 80, 312, 2039),
    ("mi300x", r"\bMI300X\b", 192, 1307, 5300),
    ("l40s", r"\bL40S\b", 48, 362, 864),
    ("l4", r"\bL4\b", 24, 121, 300),
    ("rtx-4090", r"\bRTX 4090\b", 24, 165, 1008),
    ("rtx-3090", r"\bRTX 3090\b", 24, 71, 936),
)

ACCELERATORS = {
    name: Accelerator(name, pattern, 1e9 * memory, 1e12 * flops, 1e9 * bandwidth)
    for name, pattern, memory, flops, bandwidth in _ROWS
}
"""Known accelerators by their names on the command line; patterns are tried in this order."""


def find_accelerator(device_name: str) -> Accelerator | None:
    """The accelerator that torch reports as `device_name`; None for an unknown one."""
    return next((kind for kind in ACCELERATORS.values() if re.search(kind.pattern, device_name)), None)


def parse_quantity(text: str, option: str) -> int:
    """The number that `1.3B` or `500M` stands for. Raises UserError."""
    match = _QUANTITY.fullmatch(text.strip().replace(",", "").replace("_", ""))
    number = 0.0
    if match:
        number = float(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= number <= MAX_QUANTITY:
        raise UserError(f"{option} '{text}' must be a number from 1 to 1,000T, such as 1.3B, 500M or 20k")
    return round(number)
