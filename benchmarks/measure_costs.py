"""Measure the constants of this machine one by one, and print `manyformer/costs/cost_model.py` anew with them.

    python benchmarks/measure_costs.py                                     # all, about ten minutes on a quiet machine
    python benchmarks/measure_costs.py --only toeplitz_block sparse_call --rounds 3

A size or limit is measured by the jobs that it serves: every candidate is set in turn, and the fastest one wins if it
is faster than the value in use by more than `MARGIN`. A cost is the time of what it stands for over that of one (query,
key) pair. Fields without a measurement keep their values. New values are printed with the old ones beside them. They
may change the last digits of results, so that taking them is a change of its own.
"""

import dataclasses
import re
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import frame
import torch
from cost_jobs import SWEEPS, Job, Sweep

from manyformer.bench import take_turns
from manyformer.bench.call_costs import COSTS_IN_PAIRS
from manyformer.costs import cost_model
from manyformer.costs.cost_model import COSTS

MARGIN, ROUNDS = 0.03, 5


def best_candidate(sweep: Sweep, used: Any, rounds: int) -> Any:
    """The candidate with the least median time, or the value in use where it is not clearly slower."""
    job = sweep.make_job()

    def with_value(value: Any) -> Job:
        def run() -> None:
            for place in sweep.places:
                place.put(value)
            job()

        return run

    try:
        times = take_turns({repr(value): with_value(value) for value in sweep.candidates}, rounds, frame.CPU)
    finally:
        for place in sweep.places:
            place.put(used)
    medians = {value: statistics.median(times[repr(value)]) for value in sweep.candidates}
    print("   ", ", ".join(f"{value}: {seconds * 1e3:.2f} ms" for value, seconds in medians.items()))
    fastest = min(medians, key=lambda value: medians[value])
    return fastest if medians[fastest] < medians[used] * (1 - MARGIN) else used


def rewritten(source: str, values: dict[str, Any], today: str) -> str:
    """The source of `cost_model.py` with these values and the day, the old value beside each that changed."""
    for name, value in values.items():
        if value != getattr(COSTS, name):
            line = re.compile(rf'^(    {name}: .*? = measured\()(.*)(, "\w+", ")[\d-]+("\))$', re.MULTILINE)
            match = line.search(source)
            assert match is not None, name
            prefix, old, unit, suffix = match.groups()
            source = (
                f"{source[: match.start()]}{prefix}{value!r}{unit}{today}{suffix}  # was {old}{source[match.end() :]}"
            )
    return source


def main() -> None:
    measurable = [field.name for field in dataclasses.fields(COSTS) if field.name in SWEEPS | COSTS_IN_PAIRS]
    parser = frame.argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=measurable, default=measurable, metavar="FIELD")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    frame.set_threads(arguments.threads)
    torch.manual_seed(0)
    values = {}
    for name in arguments.only:
        used = getattr(COSTS, name)
        print(f"{name}, used: {used}")
        sweep = SWEEPS.get(name)
        values[name] = (
            best_candidate(sweep, used, arguments.rounds)
            if sweep is not None
            else COSTS_IN_PAIRS[name](arguments.rounds)
        )
        print(f"    measured: {values[name]}")
    print(f"\nmeasured {len(values)} of {len(dataclasses.fields(COSTS))} fields with {arguments.threads} threads\n")
    print(rewritten(Path(cost_model.__file__).read_text(encoding="utf-8"), values, f"{datetime.now(UTC):%Y-%m-%d}"))


if __name__ == "__main__":
    main()
