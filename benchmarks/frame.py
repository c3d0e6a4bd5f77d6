"""Shared by all benchmarks: arguments, paired timings, growth with length, and rows as lines of text and as JSON."""

import argparse
import json
import math
import os
import statistics
import time

# Before torch is loaded: threads that wait for each other then sleep instead of spinning, in all candidates. Where
# other processes use the cores, spinning makes two threads many times slower than one.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from manyformer.analysis.benchmarks import extra_memory, load_warning, paired_ratio, take_turns
from manyformer.nn.runtime.costs import count_flops

CPU = torch.device("cpu")
MEMORY_RUNS = 3

Step = Callable[[], object]
BenchmarkRow = dict[str, Any]
BenchmarkPart = Callable[[int], Iterator[BenchmarkRow]]
"""A part of a benchmark, called with the number of rounds."""


class ContestOptions:
    """The options of the command line: contests whose title contains `title_filter`, with their memory or without."""

    title_filter = ""
    with_memory = True


OPTIONS = ContestOptions()


def run(doc: str, parts: Mapping[str, BenchmarkPart], *, rounds: int, out: str) -> None:
    """Measure all parts, or the one of `--only`; print their rows as they come, and write them to a file."""
    arguments = _parse_arguments(doc, list(parts), rounds, out)
    torch.manual_seed(0)
    warning = set_threads(arguments.threads)
    OPTIONS.title_filter, OPTIONS.with_memory = arguments.contests, not arguments.processor_time
    if arguments.processor_time:
        assert arguments.threads == 1, "the processor time of several threads says nothing about time: --threads 1"
        time.perf_counter = time.process_time
    selected = [part for name, part in parts.items() if arguments.only in (None, name)]
    rows = [row for part in selected for row in _printed(part(arguments.rounds))]
    record = {"threads": arguments.threads, "rounds": arguments.rounds, "torch": torch.__version__, "warning": warning}
    Path(arguments.out).write_text(json.dumps(record | {"rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(f"\nwrote {arguments.out}")


def set_threads(threads: int) -> str | None:
    """Let torch use `threads` threads, and return a warning where other processes use the machine."""
    torch.set_num_threads(threads)
    if warning := load_warning():
        print(f"warning: {warning}")
    return warning


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the docstring of a script with its line breaks."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def contest(
    title: str,
    steps: Mapping[str, Step],
    rounds: int,
    goals: Mapping[str, float],
    memory_goals: Mapping[str, float] | None = None,
) -> Iterator[BenchmarkRow]:
    """A row for each candidate; the first one's time and extra memory are divided by those of the candidate."""
    if OPTIONS.title_filter not in title:
        return
    for step in steps.values():
        step()
    memory = {name: median_memory(step) for name, step in steps.items() if OPTIONS.with_memory}
    times = take_turns(steps, rounds, CPU)
    first = next(iter(steps))
    for name in steps:
        row: BenchmarkRow = {
            "contest": title,
            "candidate": name,
            "seconds": statistics.median(times[name]),
            "memory": memory.get(name),
        }
        if name != first:
            row |= {"ratio": paired_ratio(times[first], times[name])._asdict(), "goal": goals.get(name)}
            if OPTIONS.with_memory:
                row |= {"memory_ratio": memory[first] / memory[name], "memory_goal": (memory_goals or {}).get(name)}
        yield row


def growth(candidate: str, jobs: Mapping[int, Step], rounds: int, goals: Mapping[str, float]) -> Iterator[BenchmarkRow]:
    """A row for each goal of operations, seconds and memory: how they grow with the length of a job."""
    values: dict[str, list[float]] = {}
    if "operations" in goals:
        values["operations"] = [count_flops(job) for job in jobs.values()]
    if "memory" in goals:
        values["memory"] = [median_memory(job) for job in jobs.values()]
    if "seconds" in goals:
        times = take_turns({str(length): job for length, job in jobs.items()}, rounds, CPU)
        values["seconds"] = [statistics.median(seconds) for seconds in times.values()]
    lengths = list(jobs)
    for quantity, measured in values.items():
        yield {
            "contest": f"growth from {lengths[0]} to {lengths[-1]} tokens, slopes of logarithms",
            "candidate": f"{candidate}, {quantity}",
            "values": dict(zip(lengths, measured)),
            "slope": log_slope(lengths, measured),
            "goal": goals[quantity],
        }


def log_slope(lengths: list[int], values: list[float]) -> float:
    """The slope of the least-squares line through the points (log length, log value)."""
    x, y = ([math.log(v) for v in coordinates] for coordinates in (lengths, values))
    x_mean, y_mean = statistics.fmean(x), statistics.fmean(y)
    return sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y)) / sum((a - x_mean) ** 2 for a in x)


def median_memory(step: Step) -> float:
    """The extra bytes of a step, the median of `MEMORY_RUNS`; nan where the system does not report memory."""
    sizes = [extra_memory(step, CPU) for _ in range(MEMORY_RUNS)]
    return statistics.median([math.nan if size is None else size for size in sizes])


def format_row(row: BenchmarkRow) -> str:
    """A row as text, with a verdict on each goal."""
    text = f"{row['candidate']:<34}"
    if "slope" in row:
        return text + f"{row['slope']:6.3f}" + _verdict(row["slope"], row["goal"])
    if "tokens_per_second" in row:
        text += f"{row['tokens_per_second']:9.1f} tokens/s"
    if "seconds" in row:
        text += f"{1e3 * row['seconds']:9.2f} ms"
    if row.get("memory"):
        text += f"{row['memory'] / 1e6:9.2f} MB"
    if "ratio" in row:
        ratio = row["ratio"]
        text += f"   ratio {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        text += _verdict(ratio["median"], row.get("goal"))
    if "memory_ratio" in row:
        text += f"; memory {row['memory_ratio']:.2f}" + _verdict(row["memory_ratio"], row.get("memory_goal"))
    return text


def _verdict(value: float, goal: float | None) -> str:
    return "" if goal is None else f", goal <= {goal:.3g}: {'reached' if value <= goal else 'MISSED'}"


def _printed(rows: Iterator[BenchmarkRow]) -> Iterator[BenchmarkRow]:
    """The same rows, each printed below the title of its contest."""
    title = None
    for row in rows:
        if row["contest"] != title:
            title = row["contest"]
            print(f"\n{title}")
        print("  " + format_row(row), flush=True)
        yield row


def _parse_arguments(doc: str, parts: list[str], rounds: int, out: str) -> argparse.Namespace:
    parser = argument_parser(doc)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch [2]")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"how often each candidate is timed [{rounds}]")
    parser.add_argument("--contests", default="", help="only contests whose title contains this")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="time by the processor time of the process, which other processes hardly change: one thread, no memory",
    )
    parser.add_argument("--only", choices=parts, help="one part of the measurement")
    parser.add_argument("--out", default=out, help=f"the file for the numbers [{out}]")
    return parser.parse_args()
