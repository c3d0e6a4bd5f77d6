"""Whether plans are right: peak memory and step times of three sizes of seven recipes on this CPU.

    python benchmarks/plan_accuracy.py
    python benchmarks/plan_accuracy.py --only memory --recipes bert reformer

Memory is the resident memory of a fresh process over building and three training steps, less what it had before.
Tensors are allocated apart from each other (MALLOC_MMAP_THRESHOLD_), because glibc's heap as it comes keeps what was
freed between two tensors (`--heap` measures it so). A time is predicted from ten steps of the same model, as by
`manyformer plan --calibrate`, and from ten steps of the medium size of its recipe; it is compared with later steps.
"""

import json
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frame
import torch

from manyformer.analysis.benchmarks.measuring import _reset_peak, _status_bytes, time_job
from manyformer.analysis.planning import parse_devices
from manyformer.analysis.planning.hardware import calibrate
from manyformer.analysis.planning.rehearsed_step import StepRehearsal, step_cost
from manyformer.recipes import build

LENGTH = 512
SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "small": ({"vocab": 1000, "dim": 256, "depth": 4, "heads": 4}, 4),
    "medium": ({"vocab": 4000, "dim": 384, "depth": 6, "heads": 6}, 4),
    "large": ({"vocab": 8000, "dim": 512, "depth": 8, "heads": 8}, 2),
}
"""Keywords of a model and rows of a step."""
RECIPES = (
    *("transformer-lm", "longformer-lm", "linear-transformer", "bert", "transformer", "reformer", "gated-deltanet"),
)
MEMORY_GOAL, TIME_GOAL = 0.15, 0.25
STATE_BYTES = 12
"""Of weights and moments for each parameter; gradients are part of the peak of a pass."""


def real_step(recipe: str, size: str) -> Any:
    """A training step of real weights."""
    keywords, rows = SIZES[size]
    torch.manual_seed(0)
    return StepRehearsal(build(recipe, **keywords).train(), rows, LENGTH, None)


def resident(recipe: str, size: str) -> int:
    """Bytes that a process needs for three steps."""
    # what torch and the library load at their first steps does not belong to the model
    tiny = {"vocab": 50, "dim": 64, "depth": 1, "heads": 2}
    StepRehearsal(build(recipe, **tiny).train(), 1, 64, None).as_job()()
    assert _reset_peak(), "this system does not tell the memory of a process"
    before = _status_bytes("VmRSS")
    job = real_step(recipe, size).as_job()
    for _ in range(3):
        job()
    return _status_bytes("VmHWM") - before


def memory(recipe: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Planned against measured peaks."""
    for size, (keywords, rows) in SIZES.items():
        cost = step_cost(recipe, keywords, rows=rows, length=LENGTH)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            measured = pool.apply(resident, (recipe, size))
        planned = STATE_BYTES * cost.parameters + cost.peak
        yield _row("memory, MB", recipe, size, planned / 1e6, measured / 1e6, MEMORY_GOAL)


def times(recipe: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Planned against measured seconds of a step."""
    devices, rates, flops, seconds = parse_devices("cpu"), {}, {}, {}
    for size, (keywords, rows) in SIZES.items():
        rates[size] = calibrate(recipe, keywords, devices, rows=rows, length=LENGTH, bfloat16=False)
        step = real_step(recipe, size)
        flops[size], job = step.flops(), step.as_job()
        job()
        seconds[size] = statistics.median(time_job(job, frame.CPU) for _ in range(rounds))
    for origin in ("itself", "medium"):
        for size in SIZES:
            rate = rates[size if origin == "itself" else origin]
            yield _row(f"s, from {origin}", recipe, size, flops[size] / rate, seconds[size], TIME_GOAL)


def _row(what: str, recipe: str, size: str, planned: float, measured: float, goal: float) -> dict[str, Any]:
    error = planned / measured - 1
    verdict = "reached" if abs(error) <= goal else "MISSED"
    print(
        f"{what:<16}{recipe:<20}{size:<8}{planned:10.3f} planned{measured:10.3f} measured {error:+.1%} {verdict}",
        flush=True,
    )
    return {"contest": what, "recipe": recipe, "size": size, "planned": planned, "measured": measured, "goal": goal}


def main() -> None:
    """Measure both, or the one that is asked for."""
    parts = {"memory": memory, "time": times}
    parser = frame.argument_parser(__doc__)
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="all unless given")
    parser.add_argument("--heap", action="store_true", help="glibc's allocator as it comes")
    parser.add_argument("--rounds", type=int, default=10, help="steps whose median counts [10]")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="plan_accuracy.json")
    options = parser.parse_args()
    frame.set_threads(options.threads)
    if not options.heap:
        # for the processes that are started from here
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 17)
    rows = [
        row
        for name, part in parts.items()
        for recipe in options.recipes
        if options.only in (None, name)
        for row in part(recipe, options.rounds)
    ]
    Path(options.out).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
