"""Whether plans are right on the device: the memory of a training step, planned and measured."""

from functools import partial
from typing import Any

import torch

from gpu_parts.outcome import Item, Outcome, Setting, judged
from manyformer.analysis.planning.rehearsed_step import StepRehearsal, step_cost
from manyformer.recipes import build

RECIPES = ("transformer-lm", "longformer-lm", "linear-transformer", "bert", "transformer", "gated-deltanet")
ROWS, LENGTH = 8, 512
STATE_BYTES = 12
"""Of weights and moments for each parameter; gradients are part of the peak of a pass."""
GOAL = 0.15


def items(setting: Setting) -> dict[str, Item]:
    """Each recipe."""
    return {f"memory of {name}": partial(memory, setting, name) for name in RECIPES[: 1 if setting.tiny else None]}


def memory(setting: Setting, recipe: str) -> Outcome:
    """The peak of three steps in float32."""
    dim, depth = (32, 2) if setting.tiny else (512, 8)
    keywords: dict[str, Any] = {"vocab": 8000, "dim": dim, "depth": depth, "heads": 2 if setting.tiny else 8}
    cost = step_cost(recipe, keywords, rows=ROWS, length=LENGTH)
    planned = STATE_BYTES * cost.parameters + cost.peak
    if not setting.on_gpu:
        return judged("planned alone: a CPU does not tell the memory of tensors", [], {"planned, MB": planned / 1e6})
    torch.cuda.reset_peak_memory_stats(setting.device)
    before = torch.cuda.memory_allocated(setting.device)
    job = StepRehearsal(build(recipe, **keywords).to(setting.device).train(), ROWS, LENGTH, None).as_job()
    for _ in range(3):
        job()
    measured = torch.cuda.max_memory_allocated(setting.device) - before
    error = planned / measured - 1
    misses = [f"planned {error:+.0%}, goal {GOAL:.0%}"] if abs(error) > GOAL else []
    numbers = {"planned, MB": planned / 1e6, "measured, MB": measured / 1e6, "error": error}
    return judged(f"{ROWS} x {LENGTH} tokens, d {dim}, {depth} layers", misses, numbers)
