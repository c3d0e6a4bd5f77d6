"""The hardware of a plan: devices as people write them (`8xH100`), and this machine's speed."""

import re
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from manyformer.analysis.benchmarks.measuring import time_job
from manyformer.analysis.planning.accelerators import ACCELERATORS, Accelerator, find_accelerator
from manyformer.analysis.planning.rehearsed_step import StepRehearsal
from manyformer.base.errors import UserError, suggest_names
from manyformer.nn.runtime.devices import SMALLER_WORK, best_device, device_memory, gpu_name, report_out_of_memory
from manyformer.recipes import build

CPU = "cpu"
MAX_DEVICE_COUNT = 100_000

WARM_UP = 2
STEPS = 10
GEMM_SIZE = 1024
GEMM_ROUNDS = 7
CPU_SHARE = 0.5
"""Of a CPU's products of large matrices, what a training step reached where it was measured (50 to 58 per cent)."""


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
        if self.accelerator is None:
            return device_memory(torch.device(CPU))
        return self.accelerator.memory


def parse_devices(text: str) -> DeviceSet:
    """The devices that `8xH100`, `h100` or `cpu` stands for. Raises UserError."""
    # the count ends at the first x: names of devices have one too
    match = re.fullmatch(r"(?:(\d+)x)?(.*)", text.strip().lower(), re.DOTALL)
    assert match is not None
    count = match[1] or "1"
    name = match[2].strip().replace(" ", "-")
    # a number of thousands of digits would take seconds to convert
    number = int(count) if len(count) < 9 else 0
    if not 1 <= number <= MAX_DEVICE_COUNT:
        raise UserError(f"--devices '{text}': the number of devices must be from 1 to {MAX_DEVICE_COUNT:,}")
    if name != CPU and name not in ACCELERATORS:
        raise UserError(f"--devices '{text}': no device '{name}'; {suggest_names(name, [CPU, *ACCELERATORS])}")
    return DeviceSet(number, ACCELERATORS.get(name))


def device_at_hand(devices: DeviceSet) -> torch.device:
    """The device of this machine that is one of `devices`. Raises UserError if there is none."""
    if devices.accelerator is None:
        return torch.device("cpu")
    device = best_device()
    name = gpu_name(device)
    if name is None or find_accelerator(name) != devices.accelerator:
        gpu = f"a {name}" if name else "no GPU that torch can use"
        raise UserError(f"--calibrate needs {devices.accelerator.name} at hand, and this machine has {gpu}")
    return device


def calibrate(
    recipe: str, keywords: dict[str, Any], devices: DeviceSet, *, rows: int, length: int, bfloat16: bool
) -> float:
    """Operations a second of one device, from the median of ten training steps. Raises UserError, OutOfMemory."""
    device = device_at_hand(devices)
    with report_out_of_memory("while calibrating", SMALLER_WORK), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(recipe, **keywords).to(device).train()
        autocast = None
        if bfloat16 and model.allows_autocast:
            autocast = torch.bfloat16
        step = StepRehearsal(model, rows, length, autocast)
        flops = step.flops()
        job = step.as_job()
        # the first steps allocate, choose kernels and fill caches
        for _ in range(WARM_UP):
            job()
        # the median, which a single disturbed step does not move
        return flops / statistics.median(time_job(job, device) for _ in range(STEPS))


def matmul_rate() -> float:
    """Operations a second of this CPU in products of large float32 matrices, the best of a few."""
    a, b = torch.randn(2, GEMM_SIZE, GEMM_SIZE).unbind()
    # into one result, so that no allocation is timed
    out = torch.empty(GEMM_SIZE, GEMM_SIZE)
    # the best: other load makes products slower, never faster
    seconds = min(time_job(lambda: torch.mm(a, b, out=out), torch.device("cpu")) for _ in range(GEMM_ROUNDS))
    return 2 * GEMM_SIZE**3 / seconds
