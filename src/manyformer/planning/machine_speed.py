"""The speed of this machine in training steps of a planned model: ten steps are timed."""

import statistics
from typing import Any

import torch

from manyformer.bench.clock import time_job
from manyformer.errors import UserError
from manyformer.planning.quantities import DeviceSet, find_accelerator
from manyformer.planning.rehearsed_step import StepRehearsal
from manyformer.recipes import build
from manyformer.system.device_memory import SMALLER_WORK, report_out_of_memory
from manyformer.system.devices import best_device, gpu_name

WARM_UP, STEPS = 2, 10
GEMM_SIZE, GEMM_ROUNDS = 1024, 7
CPU_SHARE = 0.5
"""Of a CPU's products of large matrices, what a training step reached where it was measured (50 to 58 per cent)."""


def device_at_hand(devices: DeviceSet) -> torch.device:
    """The device of this machine that is one of `devices`. Raises UserError if there is none."""
    if devices.accelerator is None:
        return torch.device("cpu")
    device = best_device()
    name = gpu_name(device)
    if name is None or find_accelerator(name) != devices.accelerator:
        here = f"a {name}" if name else "no GPU that torch can use"
        raise UserError(f"--calibrate needs {devices.accelerator.name} at hand, and this machine has {here}")
    return device


def calibrate(
    recipe: str, keywords: dict[str, Any], devices: DeviceSet, *, rows: int, length: int, bfloat16: bool
) -> float:
    """Operations a second of one device, from the median of ten training steps. Raises UserError, OutOfMemory."""
    device = device_at_hand(devices)
    with report_out_of_memory("while calibrating", SMALLER_WORK), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(recipe, **keywords).to(device).train()
        autocast = torch.bfloat16 if bfloat16 and model.allows_autocast else None
        step = StepRehearsal(model, rows, length, autocast)
        flops, job = step.flops(), step.as_job()
        for _ in range(WARM_UP):
            job()
        return flops / statistics.median(time_job(job, device) for _ in range(STEPS))


def matmul_rate() -> float:
    """Operations a second of this CPU in products of large float32 matrices, the best of a few."""
    a, b = torch.randn(2, GEMM_SIZE, GEMM_SIZE).unbind()
    out = torch.empty(GEMM_SIZE, GEMM_SIZE)
    seconds = min(time_job(lambda: torch.mm(a, b, out=out), torch.device("cpu")) for _ in range(GEMM_ROUNDS))
    return 2 * GEMM_SIZE**3 / seconds
