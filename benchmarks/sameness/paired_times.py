"""The main jobs of two checkouts, timed in turns by processor time, in two pairs of processes.

A process serves one checkout, one job after the other: training steps, or decodings of some tokens. In the first pair
the old checkout's process starts first, in the second the new one's; rounds begin with each of them in turns. What
counts is the median of the ratios within rounds. Memory is the peak of a job's steps beyond what its process held when
the model was built. Jobs share the time that there is: each has as many rounds as its part allows, two at least.
"""

import ctypes
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


MIN_ROUNDS = 2
"""Rounds of each pair of processes for a job that has begun, whatever the time: quartiles need some."""


class PairedTime(NamedTuple):
    """A job's ratio of times, new to old, with the quartiles, seconds and bytes of both, and the rounds of each pair.

    Bytes are None where the system does not tell the peak of a part of a process."""

    job: str
    ratio: float
    low: float
    high: float
    seconds: tuple[float, float]
    memory: tuple[int, int] | None
    rounds: int

    def __str__(self) -> str:
        old, new = (f"{1e3 * seconds:.1f}" for seconds in self.seconds)
        row = (
            f"{self.job:<24} {self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})   {old:>7} -> {new:>7} ms   "
            f"{self.rounds:>2} x 2"
        )
        if self.memory is None:
            return row
        old_memory, new_memory = self.memory
        ratio = f"{new_memory / old_memory:.3f}" if old_memory else "    -"
        return f"{row}   {ratio}   {old_memory / 2**20:.1f} -> {new_memory / 2**20:.1f} MiB"


HEADER = f"{'job':<24} {'new to old (quartiles)':<26} {'processor time':<23} {'rounds':<8} {'memory, new to old'}"


class Worker:
    """A process that does jobs of one checkout."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "_work", str(source.resolve())],
            env={**os.environ, **environment_of(source)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, job: str) -> Mapping[str, Any]:
        """Build the model of a job and do it twice; returns its settings."""
        settings: Mapping[str, Any] = self._ask({"begin": job})["settings"]
        return settings

    def seconds(self) -> float:
        """The processor time of one more step."""
        return float(self._ask({"step": 1})["seconds"])

    def memory(self) -> int | None:
        """The peak of the job's steps so far, beyond what there was before them."""
        peak = self._ask({"memory": 1})["memory"]
        return None if peak is None else int(peak)

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{json.dumps(question)}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a process of {self.source} ended with {self.process.wait()}; its error is above")
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


def compare_jobs(old: Path, new: Path, jobs: Sequence[str], rounds: int, seconds: float) -> Iterator[PairedTime | str]:
    """Time jobs of both checkouts within so many seconds; a sentence in place of what there is no time left for."""
    deadline = time.monotonic() + seconds
    sources = {"old": old, "new": new}
    # the processes of a pair in the order in which they start
    pairs = [{side: Worker(sources[side]) for side in order} for order in (("old", "new"), ("new", "old"))]
    try:
        for number, job in enumerate(jobs):
            left = deadline - time.monotonic()
            if left <= 0:
                yield f"{job:<24} not timed: the {seconds:g} seconds are over (--seconds)"
                continue
            yield _compare_job(pairs, job, rounds, left / (len(jobs) - number))
    finally:
        for pair in pairs:
            for worker in pair.values():
                worker.end()


def _compare_job(pairs: Sequence[Mapping[str, Worker]], job: str, rounds: int, seconds: float) -> PairedTime:
    """Time one job in the processes of all pairs for so many seconds, after they have begun it."""
    settings = [worker.begin(job) for pair in pairs for worker in pair.values()]
    deadline = time.monotonic() + seconds
    if any(other != settings[0] for other in settings):
        sys.exit(f"{job} is not the same in both: {settings[0]} and {settings[1]}")
    times: dict[str, list[float]] = {"old": [], "new": []}
    done = 0
    while done < rounds and (done < MIN_ROUNDS or time.monotonic() < deadline):
        for pair in pairs:
            # each process is the first of a round as often as the other
            for side in pair if done % 2 == 0 else reversed(pair):
                times[side].append(pair[side].seconds())
        done += 1
    peaks = {side: [pair[side].memory() for pair in pairs] for side in times}
    known = {side: [peak for peak in of_side if peak is not None] for side, of_side in peaks.items()}
    memory = (min(known["old"]), min(known["new"])) if known["old"] and known["new"] else None
    ratios = [after / before for before, after in zip(times["old"], times["new"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    medians = statistics.median(times["old"]), statistics.median(times["new"])
    return PairedTime(job, statistics.median(ratios), low, high, medians, memory, done)


def work(source: Path) -> None:
    """Serve the jobs of a checkout on standard input and output until the input ends."""
    use_sources(source)
    import torch

    torch.set_num_threads(1)
    make_job = own_jobs(source)
    step: Callable[[], object] = lambda: None  # noqa: E731
    held: int | None = None
    for line in sys.stdin:
        question = json.loads(line)
        if "begin" in question:
            # the model of the last job goes before there is another
            step = lambda: None  # noqa: E731
            step, settings = make_job(question["begin"])
            held = _forget_peak()
            for _ in range(2):
                step()
            answer: dict[str, Any] = {"settings": settings}
        elif "memory" in question:
            answer = {"memory": None if held is None else _kibibytes("VmHWM") * 1024 - held}
        else:
            start = time.process_time()
            step()
            answer = {"seconds": time.process_time() - start}
        print(json.dumps(answer), flush=True)


def own_jobs(source: Path) -> Callable[[str], tuple[Callable[[], object], Mapping[str, Any]]]:
    """`job_of` of the checkout of these sources, which knows its private names; that of this file where it has none."""
    file = source.parent / "benchmarks" / "sameness" / Path(__file__).name
    spec = importlib.util.spec_from_file_location("own_paired_times", file) if file.is_file() else None
    if spec is None or spec.loader is None:
        return job_of
    module = importlib.util.module_from_spec(spec)
    # classes look for their module while it is being executed
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Callable[[str], tuple[Callable[[], object], Mapping[str, Any]]] = module.job_of
    return found


def _forget_peak() -> int | None:
    """Begin a new peak of the memory of this process, and return the bytes that it holds; None where nobody can."""
    gc.collect()
    try:
        # what earlier jobs have freed goes back to the system, so that it does not hide what this one needs
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _kibibytes("VmRSS") * 1024
    except (OSError, AttributeError):
        return None


def _kibibytes(name: str) -> int:
    """A size of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def job_of(job: str) -> tuple[Callable[[], object], Mapping[str, Any]]:
    """The function that does the job once, and its sizes."""
    import torch

    import manyformer as mf
    from manyformer.config import AdamWConfig
    from manyformer.recipes import get_recipe
    from manyformer.recipes.parts.registry import task_of
    from manyformer.training.engine import TrainingEngine
    from manyformer.training.process_group import DDPStrategy

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
