"""The main jobs of two checkouts, timed in turns by processor time, each job in two pairs of processes.

A process holds one job of one checkout: a training step, or the decoding of some tokens. In the first pair the old
checkout's process starts first, in the second the new one's; rounds begin with each of them in turns. What counts is
the median of the ratios within rounds. Memory is what a process needed beyond what it had before its first step.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = Path(__file__).parents[1] / "same_results.py"

SIZES: dict[str, Any] = {"vocab": 256, "dim": 128, "depth": 4, "heads": 4, "dropout": 0.0, "max_length": 1024}
ROWS, LENGTH = 1, 512
PROMPT, NEW_TOKENS = 64, 64

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("transformer-lm", {}),
    "window": ("longformer-lm", {}),
    "linear": ("linear-transformer", {}),
    "Reformer": ("reformer", {}),
    "recurrent": ("gated-deltanet", {}),
    "early exit": ("depth-adaptive-lm", {}),
    "sparse": ("sparse-transformer", {}),
}
"""The recipe of each main mechanism, and keywords beside `SIZES`."""

JOBS = tuple(f"{kind} of {name}" for kind in ("step", "decoding") for name in RECIPES)


class PairedTime(NamedTuple):
    """A job's ratio of times, new to old, with the quartiles, and seconds and bytes of both."""

    job: str
    ratio: float
    low: float
    high: float
    seconds: tuple[float, float]
    memory: tuple[int, int]

    def __str__(self) -> str:
        old, new = (f"{1e3 * seconds:.1f}" for seconds in self.seconds)
        old_memory, new_memory = (f"{size / 2**20:.1f}" for size in self.memory)
        return (
            f"{self.job:<24} {self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})   "
            f"{old} -> {new} ms   {old_memory} -> {new_memory} MiB"
        )


class Worker:
    """A process with one job of one checkout."""

    def __init__(self, source: Path, job: str) -> None:
        script = script_of(source)
        environment = {**os.environ, **environment_of(source)}
        self.process = subprocess.Popen(
            [sys.executable, str(script), "_work", job],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.settings = self._answer()

    def seconds(self) -> float:
        """The processor time of one more step."""
        return float(self._ask("step")["seconds"])

    def end(self) -> int:
        """The memory that steps needed; the process ends."""
        memory = int(self._ask("end")["memory"])
        self.process.wait()
        return memory

    def _ask(self, word: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a process ended with {self.process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def script_of(source: Path) -> Path:
    """The script beside the sources, which fits their private names, or this one where they have none."""
    own = source.parent / "benchmarks" / SCRIPT.name
    return own if own.is_file() else SCRIPT


def environment_of(source: Path) -> dict[str, str]:
    """The variables of a process that imports these sources, on one thread and with nobody's measured costs."""
    return {
        "PYTHONPATH": str(source.resolve()),
        "OMP_NUM_THREADS": "1",
        "MANYFORMER_CACHE": str(Path("/nonexistent")),
    }


def use_sources(source: Path) -> None:
    """Import the package from this folder in this process, whatever its environment would import."""
    # an environment may put its own sources before those of PYTHONPATH
    sys.path.insert(0, str(source.resolve()))
    import manyformer

    if not Path(manyformer.__file__).is_relative_to(source.resolve()):
        sys.exit(f"{manyformer.__file__} was imported, not {source}")


def compare_times(old: Path, new: Path, job: str, rounds: int) -> PairedTime:
    """Time one job of both."""
    times: tuple[list[float], list[float]] = ([], [])
    memory: tuple[list[int], list[int]] = ([], [])
    sources = (old, new)
    for first in (0, 1):
        order = (first, 1 - first)
        workers = {side: Worker(sources[side], job) for side in order}
        if workers[0].settings != workers[1].settings:
            sys.exit(f"{job} is not the same in both: {workers[0].settings} and {workers[1].settings}")
        for number in range(rounds):
            for side in order if number % 2 == 0 else order[::-1]:
                times[side].append(workers[side].seconds())
        for side in order:
            memory[side].append(workers[side].end())
    ratios = [after / before for before, after in zip(*times)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return PairedTime(
        job,
        statistics.median(ratios),
        low,
        high,
        (statistics.median(times[0]), statistics.median(times[1])),
        (min(memory[0]), min(memory[1])),
    )


def work(job: str) -> None:
    """Serve one job on standard input and output until it is told to end."""
    use_sources(Path(os.environ["PYTHONPATH"]))
    import torch

    torch.set_num_threads(1)
    step, settings = job_of(job)
    before = _largest_memory()
    for _ in range(2):
        step()
    print(json.dumps(settings), flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            print(json.dumps({"memory": _largest_memory() - before}), flush=True)
            return
        start = time.process_time()
        step()
        print(json.dumps({"seconds": time.process_time() - start}), flush=True)


def _largest_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def job_of(job: str) -> tuple[Callable[[], object], Mapping[str, Any]]:
    """The function that does the job once, and its sizes."""
    import torch

    import manyformer as mf
    from manyformer.config import AdamWConfig
    from manyformer.recipes import get_recipe
    from manyformer.recipes.registry import task_of
    from manyformer.train.engine import TrainingEngine
    from manyformer.train.process_group import DDPStrategy

    kind, _, name = job.partition(" of ")
    recipe, own = RECIPES[name]
    parameters = get_recipe(recipe).signature.parameters
    keywords = {key: value for key, value in SIZES.items() if key in parameters} | own
    torch.manual_seed(0)
    model = mf.build(recipe, **keywords)
    settings = {"recipe": recipe, "keywords": keywords}
    generator = torch.Generator().manual_seed(0)
    if kind == "decoding":
        model.eval()
        prompt = torch.randint(SIZES["vocab"], (PROMPT,), generator=generator).tolist()
        decode = lambda: mf.generate(model, prompt, temperature=0.0, max_new=NEW_TOKENS, stop_ids=())  # noqa: E731
        return decode, settings | {"tokens": [PROMPT, NEW_TOKENS]}
    task = task_of(model)
    inputs = task.example(model, torch.randint(task.token_ids(model), (ROWS, LENGTH), generator=generator))
    batch = task.batch(model, inputs, task.random_targets(model, inputs, generator))
    engine = TrainingEngine(model, AdamWConfig(), DDPStrategy())
    return lambda: engine.step([batch], 1e-4), settings | {"batch": [ROWS, LENGTH]}
