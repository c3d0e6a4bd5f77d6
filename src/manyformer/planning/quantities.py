"""Quantities and hardware as people write them: `1.3B`, `26B`, `8xH100`."""

import re
from dataclasses import dataclass

import torch

from manyformer.costs.hardware import ACCELERATORS, Accelerator
from manyformer.errors import UserError, suggest_names
from manyformer.system.device_memory import device_memory

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([kmbt]?)", re.IGNORECASE)
MAX_QUANTITY = 1e15
MAX_DEVICE_COUNT = 100_000
CPU = "cpu"


def parse_quantity(text: str, option: str) -> int:
    """The number that `1.3B` or `500M` stands for. Raises UserError."""
    match = _QUANTITY.fullmatch(text.strip().replace(",", "").replace("_", ""))
    number = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 1 <= number <= MAX_QUANTITY:
        raise UserError(f"{option} '{text}' must be a number from 1 to 1,000T, such as 1.3B, 500M or 20k")
    return round(number)


@dataclass(frozen=True)
class DeviceSet:
    """`count` equal devices; `accelerator` is None for CPUs like this machine's."""

    count: int
    accelerator: Accelerator | None

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.count}x{CPU if self.accelerator is None else self.accelerator.name}"

    @property
    def memory(self) -> float:
        """Bytes of each device; of a CPU those that this process may use."""
        return device_memory(torch.device(CPU)) if self.accelerator is None else self.accelerator.memory


def parse_devices(text: str) -> DeviceSet:
    """The devices that `8xH100`, `h100` or `cpu` stands for. Raises UserError."""
    count, _, name = (
        text.strip().lower().rpartition("x") if re.match(r"\d+x", text.strip().lower()) else ("1", "", text)
    )
    name = name.strip().lower().replace(" ", "-")
    number = int(count) if len(count) < 9 else 0
    if not 1 <= number <= MAX_DEVICE_COUNT:
        raise UserError(f"--devices '{text}': the number of devices must be from 1 to {MAX_DEVICE_COUNT:,}")
    if name != CPU and name not in ACCELERATORS:
        raise UserError(f"--devices '{text}': no device '{name}'; {suggest_names(name, [CPU, *ACCELERATORS])}")
    return DeviceSet(number, ACCELERATORS.get(name))
