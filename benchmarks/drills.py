"""Drills: `python benchmarks/drills.py --trials 1500 --jobs 2` does faults to commands and counts what comes of it.

A trial is repeated with its seed, family and number: `python benchmarks/drills.py --seed 0 --only damage --trial 17`.
The exit code is 1 if any trial is a fault: unnamed, hung, silent, crashed, or code that ran. It runs on Linux.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from fault_injection import (
    adapters,
    damage,
    environments,
    full_disks,
    hostile_folders,
    kills,
    media,
    mutations,
    planted_code,
    servers,
    tables,
)
from fault_injection.forked_commands import load_everything
from fault_injection.outcomes import NotRun, Trial, table
from fault_injection.workshop import DrillError, Workshop

Family = Callable[[Workshop, int], Trial | NotRun]

FAMILIES: dict[str, tuple[Family, int]] = {
    kills.FAMILY: (kills.carry_out, 12),
    full_disks.FAMILY: (full_disks.carry_out, 6),
    damage.FAMILY: (damage.carry_out, 14),
    hostile_folders.FAMILY: (hostile_folders.carry_out, 22),
    mutations.FAMILY: (mutations.carry_out, 10),
    planted_code.FAMILY: (planted_code.carry_out, 6),
    tables.FAMILY: (tables.carry_out, 8),
    media.FAMILY: (media.carry_out, 6),
    adapters.FAMILY: (adapters.carry_out, 5),
    environments.FAMILY: (environments.carry_out, 8),
    servers.FAMILY: (servers.carry_out, 3),
}
"""Each family of faults and its part of a hundred trials."""


def main() -> int:
    """Carry out the trials that the command line asks for, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="decides every trial")
    parser.add_argument("--trials", type=int, default=100, help="trials of all families together, or of one (--only)")
    parser.add_argument("--only", choices=FAMILIES, help="one family of faults")
    parser.add_argument("--trial", type=int, help="with --only: this one trial")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the trials")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which a command counts as hung")
    parser.add_argument("--minutes", type=float, help="begin no trial after so many minutes")
    parser.add_argument("--json", action="store_true", help="print every trial as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table with the line that repeats it")
    parser.add_argument("--verbose", action="store_true", help="tell every trial as it ends")
    options = parser.parse_args()
    if options.trial is not None and options.only is None:
        parser.error("--trial needs --only FAMILY")
    if options.jobs < 1 or options.trials < 1:
        parser.error("--jobs and --trials must be 1 or more")
    os.nice(10)
    load_everything()
    root = Path(tempfile.mkdtemp(prefix="drills-"))
    try:
        trials = carry_out_all(options, root)
    finally:
        for job in range(options.jobs):
            full_disks.unmount(root / str(job) / "here")
        shutil.rmtree(root, ignore_errors=True)
    trials.sort(key=lambda trial: (list(FAMILIES).index(trial.family), trial.number))
    if options.json:
        print(json.dumps([asdict(trial) for trial in trials], indent=1))
    else:
        if options.markdown:
            arguments = f"--seed {options.seed}" + (f" --only {options.only}" if options.only else "")
            print(f"`{arguments} --trials {len(trials)} --timeout {options.timeout:g}`:\n")
        print(table(trials))
    return int(any(isinstance(trial, Trial) and trial.is_fault for trial in trials))


def carry_out_all(options: argparse.Namespace, root: Path) -> list[Trial | NotRun]:
    """The trials in one or several processes, each of which takes the next one that is left, in a folder of its own."""
    plan = planned(options.trials, options.only, options.trial)
    reader, writer = os.pipe()
    # the numbers of the trials lie in a pipe, from which any process takes the next; a pipe holds 64 KiB
    plan = plan[: 1 << 14]
    os.write(writer, b"".join(index.to_bytes(4, "little") for index in range(len(plan))))
    os.close(writer)
    workers = []
    for job in range(options.jobs):
        sys.stdout.flush()
        worker = os.fork()
        if not worker:
            os._exit(_work(options, plan, reader, root / str(job)))
        workers.append(worker)

    # asked to stop, the processes remove what they have made
    def stop(number: int, frame: object) -> None:
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    codes = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
    if any(codes):
        raise SystemExit("a process of the drills has failed")
    lines = [line for job in range(options.jobs) for line in (root / str(job) / "trials.jsonl").open()]
    return [(Trial if "outcome" in record else NotRun)(**record) for record in map(json.loads, lines)]


def _work(options: argparse.Namespace, plan: list[tuple[str, int]], reader: int, root: Path) -> int:
    """Be one of the processes: carry out trials and write them down until none is left; the exit code."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    root.mkdir()
    try:
        workshop = Workshop(root, options.seed, options.timeout)
        with (root / "trials.jsonl").open("w") as file:
            for family, number in _taken(plan, reader):
                if time.monotonic() > end:
                    break
                trial = carry_out(workshop, family, number)
                file.write(json.dumps(asdict(trial)) + "\n")
                file.flush()
                if options.verbose or (isinstance(trial, Trial) and trial.is_fault):
                    print(told(trial, options.seed), file=sys.stderr, flush=True)
    except BaseException:
        # this process must not go on as the one that it was forked from
        traceback.print_exc()
        return 1
    finally:
        full_disks.unmount(root / "here")
    return 0


def _taken(plan: list[tuple[str, int]], reader: int) -> Iterator[tuple[str, int]]:
    while index := os.read(reader, 4):
        yield plan[int.from_bytes(index, "little")]


def carry_out(workshop: Workshop, family: str, number: int) -> Trial | NotRun:
    """One trial; where even the undisturbed command fails, that is a crash."""
    try:
        return FAMILIES[family][0](workshop, number)
    except DrillError as error:
        return Trial(family, number, "nothing was done yet", "crashed", "", str(error)[:500])
    except Exception as error:
        # the trial has not foreseen what the command did, which is a fault until somebody has looked at it
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Trial(family, number, "the drill itself fails", "crashed", "", f"{place.name}: {error!r:.300}")
    finally:
        full_disks.unmount(workshop.here)


def planned(trials: int, only: str | None, trial: int | None) -> list[tuple[str, int]]:
    """The families and numbers of the trials; the families take turns, so that any beginning is a fair sample."""
    if only is not None:
        return [(only, number) for number in (range(trials) if trial is None else [trial])]
    turns = [
        ((number + 0.5) / part, family, number) for family, (_, part) in FAMILIES.items() for number in range(trials)
    ]
    # each family first once, so that even a few trials are of all
    order = sorted(turns, key=lambda turn: (turn[2] > 0, turn))
    return [(family, number) for _, family, number in order[:trials]]


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
