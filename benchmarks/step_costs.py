"""Time a training step of every recipe of some tasks at equal sizes: `step_costs.py`, for `manyformer advise`.

The sizes are those of `manyformer bench` (width 256, 4 layers, 4 heads). The time is that of the processor, on one
thread, the least of a few steps, since other work on the machine changes it least. Each cell is written at once;
cells that are there are not measured again."""

import argparse
import json
import math
import time

import torch

from manyformer.analysis.benchmarks.bench import SIZES, BenchCandidate, BenchSetting, CandidateBench
from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write_text
from manyformer.config.shipped import STEP_COSTS
from manyformer.recipes.parts.cards import listed_recipes

TASKS = ("masked-lm", "translation", "classification")
LENGTHS = (128, 512, 2048)
ROUNDS = 3
MOST_SECONDS = 15.0
"""Longer lengths are skipped for a recipe whose step takes longer."""


def step_seconds(recipe: str, length: int) -> float:
    """The processor's seconds of a training step of one row of `length` tokens. Raises UserError, ValueError."""
    setting = BenchSetting(torch.device("cpu"), 1, length, "float32", 0, {})
    bench = CandidateBench(BenchCandidate(recipe, recipe, {}), setting)
    if reason := bench.unsupported_reason("step"):
        raise UserError(reason)
    job = bench.job("step", length)
    # the first step allocates and chooses paths
    job()
    least = math.inf
    for _ in range(ROUNDS):
        start = time.process_time()
        job()
        least = min(least, time.process_time() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = {"sizes": SIZES, "rounds": ROUNDS, "torch": torch.__version__, "steps": []}
    if STEP_COSTS.is_file():
        record = json.loads(STEP_COSTS.read_text(encoding="utf-8"))
    for length in LENGTHS:
        for name, listed in listed_recipes().items():
            measured = {step["length"]: step["seconds"] for step in record["steps"] if step["recipe"] == name}
            too_slow = any(seconds > MOST_SECONDS for seconds in measured.values())
            if listed.card.task.name not in arguments.tasks or length in measured or too_slow:
                continue
            try:
                seconds = step_seconds(name, length)
            except ValueError as error:
                print(f"{name} at {length}: {error}", flush=True)
                continue
            record["steps"].append({"recipe": name, "length": length, "seconds": float(f"{seconds:.3g}")})
            lines = ",\n".join(json.dumps(step) for step in record["steps"])
            head = json.dumps({**record, "steps": []}).removesuffix("]}")
            atomic_write_text(STEP_COSTS, f"{head}\n{lines}\n]}}\n")
            print(name, length, f"{seconds:.3g}", flush=True)


if __name__ == "__main__":
    main()
