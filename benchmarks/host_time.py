"""Measure what Python does in a training step while a GPU would compute: the step without its operators.

    python benchmarks/host_time.py

The step runs on a device that tensors of the CPU pretend to be, with the branches that CUDA takes, and the time within
operators is subtracted. What is left are the package, torch, autograd and the calls of operators. Processor time
of one thread, the least of several steps; a GPU is kept busy where its own time for these operators is longer.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import manyformer as mf
from manyformer.config import AdamWConfig
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.registry import task_of
from manyformer.training.engine import TrainingEngine
from manyformer.training.process_group import DDPStrategy
from pretended_device import pretended_device
from pretended_device.operators import PretendedOperators

RECIPES = ("transformer-lm", "llama", "longformer-lm", "bert", "mixtral")
SIZES = {"vocab": 256, "dim": 64, "depth": 4, "heads": 4, "max_length": 256, "dropout": 0.0}
"""Small: the host's time depends on the number of layers, hardly on their width."""

ROWS, LENGTH, STEPS = 2, 256, 7


class OperatorClock:
    """The processor time and the number of operators since it was reset."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0
        dispatch = PretendedOperators.__torch_dispatch__

        def timed(mode: PretendedOperators, *args: Any) -> Any:
            start = time.process_time()
            try:
                return dispatch(mode, *args)
            finally:
                self.seconds += time.process_time() - start
                self.calls += 1

        PretendedOperators.__torch_dispatch__ = timed  # type: ignore[method-assign]

    def reset(self) -> None:
        """Begin at 0."""
        self.seconds, self.calls = 0.0, 0


def measure(recipe: str, clock: OperatorClock) -> tuple[float, int]:
    """The least seconds of a step apart from its operators, and their number."""
    keywords = {name: value for name, value in SIZES.items() if name in get_recipe(recipe).signature.parameters}
    model, generator = mf.build(recipe, **keywords), torch.Generator().manual_seed(0)
    task = task_of(model)
    inputs = task.example(model, torch.randint(task.token_ids(model), (ROWS, LENGTH), generator=generator))
    batch = task.batch(model, inputs, task.random_targets(model, inputs, generator))
    engine = TrainingEngine(model.to("cuda"), AdamWConfig(), DDPStrategy(), autocast=torch.bfloat16)
    results = []
    for _ in range(STEPS):
        clock.reset()
        start = time.process_time()
        engine.step([batch], 1e-3)
        results.append((time.process_time() - start - clock.seconds, clock.calls))
    return min(results)


def main() -> None:
    """Print a row for each recipe."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    clock = OperatorClock()
    print("| recipe, 4 layers, bf16 | operators | host, ms | host, us an operator |\n| --- | ---: | ---: | ---: |")
    for recipe in RECIPES:
        with pretended_device():
            seconds, calls = measure(recipe, clock)
        print(f"| `{recipe}` | {calls:,} | {1e3 * seconds:.1f} | {1e6 * seconds / calls:.0f} |", flush=True)


if __name__ == "__main__":
    main()
