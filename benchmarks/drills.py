"""Drills: `python benchmarks/drills.py --trials 500` does faults to real commands and counts what comes of it.

A trial is repeated with its seed, family and number: `python benchmarks/drills.py --seed 0 --only damage --trial 17`.
The exit code is 1 if any trial is a fault: silent, crashed, hung or unnamed. It runs on Linux.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fault_injection import damage, full_disks, hostile_folders, kills, mutations
from fault_injection.forked_commands import load_everything
from fault_injection.outcomes import NotRun, Trial, table
from fault_injection.workshop import Workshop

FAMILIES: dict[str, tuple[Callable[[Workshop, int], Trial | NotRun], int]] = {
    kills.FAMILY: (kills.carry_out, 20),
    full_disks.FAMILY: (full_disks.carry_out, 8),
    damage.FAMILY: (damage.carry_out, 22),
    hostile_folders.FAMILY: (hostile_folders.carry_out, 40),
    mutations.FAMILY: (mutations.carry_out, 10),
}
"""Each family of faults and its part of a hundred trials."""


def main() -> int:
    """Carry out the trials that the command line asks for, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="decides every trial")
    parser.add_argument("--trials", type=int, default=100, help="trials of all families together, or of one (--only)")
    parser.add_argument("--only", choices=FAMILIES, help="one family of faults")
    parser.add_argument("--trial", type=int, help="with --only: this one trial")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which a command counts as hung")
    parser.add_argument("--minutes", type=float, help="begin no trial after so many minutes")
    parser.add_argument("--json", action="store_true", help="print every trial as JSON")
    parser.add_argument("--verbose", action="store_true", help="tell every trial as it ends")
    options = parser.parse_args()
    if options.trial is not None and options.only is None:
        parser.error("--trial needs --only FAMILY")
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    os.nice(10)
    # asked to stop, it removes what it has made
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    load_everything()
    root = Path(tempfile.mkdtemp(prefix="drills-"))
    trials: list[Trial | NotRun] = []
    try:
        workshop = Workshop(root, options.seed, options.timeout)
        for family, number in planned(options.trials, options.only, options.trial):
            if time.monotonic() > end:
                break
            trials.append(FAMILIES[family][0](workshop, number))
            if options.verbose or (isinstance(trials[-1], Trial) and trials[-1].is_fault):
                print(told(trials[-1], options.seed), file=sys.stderr, flush=True)
    finally:
        full_disks.unmount(root / "here")
        shutil.rmtree(root, ignore_errors=True)
    trials.sort(key=lambda trial: list(FAMILIES).index(trial.family))
    print(json.dumps([asdict(trial) for trial in trials], indent=1) if options.json else table(trials))
    return int(any(isinstance(trial, Trial) and trial.is_fault for trial in trials))


def planned(trials: int, only: str | None, trial: int | None) -> list[tuple[str, int]]:
    """The families and numbers of the trials; the families take turns, so that any beginning is a fair sample."""
    if only is not None:
        return [(only, number) for number in (range(trials) if trial is None else [trial])]
    turns = [
        ((number + 0.5) / part, family, number) for family, (_, part) in FAMILIES.items() for number in range(trials)
    ]
    return [(family, number) for _, family, number in sorted(turns)[:trials]]


def told(trial: Trial | NotRun, seed: int) -> str:
    """A trial in two lines, the second of which repeats it."""
    if isinstance(trial, NotRun):
        return f"not run: {trial.family} {trial.number}: {trial.reason}"
    lines = [f"{trial.outcome}: {trial.deed}: `{trial.command}`: {trial.detail} ({trial.seconds:.1f} s)"]
    return "\n".join(
        [*lines, f"    python benchmarks/drills.py --seed {seed} --only {trial.family} --trial {trial.number}"]
    )


if __name__ == "__main__":
    sys.exit(main())
