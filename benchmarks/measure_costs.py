"""Measure the sizes, limits and costs that stand beside their kernels, on this machine, one by one.

    python benchmarks/measure_costs.py                                     # all, about ten minutes on a quiet machine
    python benchmarks/measure_costs.py --only toeplitz_attention plan_search.CALL --rounds 3

A size or limit is measured by the jobs that it serves: every candidate is set in turn, and the fastest one wins if it
is faster than the value in use by more than `MARGIN`. A cost is the time of what it stands for over that of one (query,
key) pair. Prints each constant with the value in use and the measured one. Another value may change the last digits of
results on every machine, so that taking it over is a change of its own.
"""

import statistics
from typing import Any

import frame
import torch
from call_costs import CALL_COSTS
from cost_jobs import SWEEPS, Job, Place, Sweep

from manyformer.analysis.benchmarks import take_turns

MARGIN = 0.03
ROUNDS = 5


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


def measure(place: Place, rounds: int) -> Any:
    """The value of a constant on this machine."""
    for sweep in SWEEPS:
        if sweep.places[0] == place:
            return best_candidate(sweep, place.get(), rounds)
    return dict(CALL_COSTS)[place](rounds)


def main() -> None:
    measurable = [sweep.places[0] for sweep in SWEEPS] + [place for place, _ in CALL_COSTS]
    parser = frame.argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="constants whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    chosen = [place for place in measurable if not arguments.only or any(name in str(place) for name in arguments.only)]
    if not chosen:
        parser.error(f"no constant has such a name; there are {', '.join(map(str, measurable))}")
    frame.set_threads(arguments.threads)
    torch.manual_seed(0)
    results = []
    for place in chosen:
        print(place)
        results.append((place, place.get(), measure(place, arguments.rounds)))
    print(f"\nwith {arguments.threads} threads:")
    for place, used, measured in results:
        print(f"{place}: {measured}" + ("" if measured == used else f", used: {used}"))


if __name__ == "__main__":
    main()
