"""What all benchmarks share: arguments, contests in turns, growth with length, rows as lines for people and as JSON."""

import argparse
import json
import math
import os
import statistics
import time

# Before torch is loaded: threads that wait for each other then sleep instead of spinning, for everybody alike. With a
# busy neighbour, spinning makes two threads many times slower than one.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from manyformer.bench import extra_memory, load_warning, paired_ratio, take_turns
from manyformer.costs.flops import count_flops

CPU = torch.device("cpu")
MEMORY_RUNS = 3

Step = Callable[[], object]
Row = dict[str, Any]
Part = Callable[[int], Iterator[Row]]
"""A part of a benchmark, which is told how often to time everything."""


class Measured:
    """What the command line asks for: contests whose name has `what` in it, and whether their memory."""

    what = ""
    memory = True


MEASURED = Measured()


def run(doc: str, parts: Mapping[str, Part], *, rounds: int, out: str) -> None:
    """Measure each part, or the one that is asked for; print rows as they come, and write them down."""
    words = _arguments(doc, list(parts), rounds, out)
    torch.manual_seed(0)
    warning = settle(words.threads)
    MEASURED.what, MEASURED.memory = words.contests, not words.processor_time
    if words.processor_time:
        assert words.threads == 1, "the processor time of several threads says nothing about time: --threads 1"
        time.perf_counter = time.process_time
    rows = [row for name, part in parts.items() if words.only in (None, name) for row in _shown(part(words.rounds))]
    found = {"threads": words.threads, "rounds": words.rounds, "torch": torch.__version__, "warning": warning}
    Path(words.out).write_text(json.dumps(found | {"rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(f"\nwrote {words.out}")


def settle(threads: int) -> str | None:
    """Let torch use so many threads; what is said where the machine is busy with something else."""
    torch.set_num_threads(threads)
    if warning := load_warning():
        print(f"warning: {warning}")
    return warning


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Of the command line of a script that its docstring describes as it stands there."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def contest(
    what: str,
    steps: Mapping[str, Step],
    rounds: int,
    goals: Mapping[str, float],
    memory_goals: Mapping[str, float] | None = None,
) -> Iterator[Row]:
    """A row for each candidate: the first one's time, and its extra memory, as shares of each other one's."""
    if MEASURED.what not in what:
        return
    for step in steps.values():
        step()
    memory = {name: memory_of(step) for name, step in steps.items() if MEASURED.memory}
    times = take_turns(steps, rounds, CPU)
    first = next(iter(steps))
    for name in steps:
        row: Row = {
            "what": what,
            "candidate": name,
            "seconds": statistics.median(times[name]),
            "memory": memory.get(name),
        }
        if name != first:
            row |= {"ratio": paired_ratio(times[first], times[name])._asdict(), "goal": goals.get(name)}
            if MEASURED.memory:
                row |= {"memory_ratio": memory[first] / memory[name], "memory_goal": (memory_goals or {}).get(name)}
        yield row


def growth(candidate: str, jobs: Mapping[int, Step], rounds: int, goals: Mapping[str, float]) -> Iterator[Row]:
    """Rows of how operations, seconds and memory, as far as goals name them, grow with the length of a job."""
    values: dict[str, list[float]] = {}
    if "operations" in goals:
        values["operations"] = [count_flops(job) for job in jobs.values()]
    if "memory" in goals:
        values["memory"] = [memory_of(job) for job in jobs.values()]
    if "seconds" in goals:
        times = take_turns({str(length): job for length, job in jobs.items()}, rounds, CPU)
        values["seconds"] = [statistics.median(found) for found in times.values()]
    lengths = list(jobs)
    for what, found in values.items():
        yield {
            "what": f"growth from {lengths[0]} to {lengths[-1]} tokens, slopes of logarithms",
            "candidate": f"{candidate}, {what}",
            "values": dict(zip(lengths, found)),
            "slope": slope(lengths, found),
            "goal": goals[what],
        }


def slope(lengths: list[int], values: list[float]) -> float:
    """Of the straight line nearest to the points (log length, log value)."""
    x, y = ([math.log(v) for v in part] for part in (lengths, values))
    mean = [statistics.fmean(part) for part in (x, y)]
    return sum((a - mean[0]) * (b - mean[1]) for a, b in zip(x, y)) / sum((a - mean[0]) ** 2 for a in x)


def memory_of(step: Step) -> float:
    """Extra bytes of a step, the median of a few; nan where the machine cannot tell."""
    found = [extra_memory(step, CPU) for _ in range(MEMORY_RUNS)]
    return statistics.median([math.nan if number is None else number for number in found])


def line(row: Row) -> str:
    """One row for people, and whether its goals are reached."""
    told = f"{row['candidate']:<34}"
    if "slope" in row:
        return told + f"{row['slope']:6.3f}" + _verdict(row["slope"], row["goal"])
    if "tokens_per_second" in row:
        told += f"{row['tokens_per_second']:9.1f} tokens/s"
    if "seconds" in row:
        told += f"{1e3 * row['seconds']:9.2f} ms"
    if row.get("memory"):
        told += f"{row['memory'] / 1e6:9.2f} MB"
    if "ratio" in row:
        ratio = row["ratio"]
        told += f"   ratio {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        told += _verdict(ratio["median"], row.get("goal"))
    if "memory_ratio" in row:
        told += f"; memory {row['memory_ratio']:.2f}" + _verdict(row["memory_ratio"], row.get("memory_goal"))
    return told


def _verdict(value: float, goal: float | None) -> str:
    return "" if goal is None else f", goal <= {goal:.3g}: {'reached' if value <= goal else 'MISSED'}"


def _shown(rows: Iterator[Row]) -> Iterator[Row]:
    what = None
    for row in rows:
        if row["what"] != what:
            what = row["what"]
            print(f"\n{what}")
        print("  " + line(row), flush=True)
        yield row


def _arguments(doc: str, parts: list[str], rounds: int, out: str) -> argparse.Namespace:
    parser = parser_of(doc)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch [2]")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"how often everything is timed [{rounds}]")
    parser.add_argument("--contests", default="", help="only those with this in their name")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="time by the processor time of the process, which other work hardly changes: one thread, no memory",
    )
    parser.add_argument("--only", choices=parts, help="one part of the measurement")
    parser.add_argument("--out", default=out, help=f"where the numbers go [{out}]")
    return parser.parse_args()
