"""Commands that are killed at random moments and given again until they end."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from fault_injection import scenarios
from fault_injection.forked_commands import RunningCommand, left_over_processes
from fault_injection.outcomes import NotRun, Outcome, Trial
from fault_injection.scenarios import Scenario
from fault_injection.workshop import Reference, Workshop, differing, results_of

FAMILY = "kills"
SCENARIOS = (
    scenarios.LANGUAGE,
    scenarios.DATASTORE,
    scenarios.MEMORY,
    scenarios.HASHES,
    scenarios.TRANSLATION,
    scenarios.LABELS,
    scenarios.IMAGES,
    scenarios.COMPARISON,
    scenarios.EXPORT,
    scenarios.PRUNING,
    scenarios.TO_HUGGING_FACE,
    scenarios.FOREIGN,
    scenarios.TREES,
    scenarios.SOUNDS,
)
PROCESSES_EVERY = 25
"""One trial in so many is a run of two processes, which start anew and so take many times as long."""

ENDED = {0, 130, 143, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL}
STOP_SECONDS = 20.0
"""A command that was asked to stop and has not after so long on a busy machine has not heard it."""


def carry_out(workshop: Workshop, number: int) -> Trial | NotRun:
    """Up to three signals, then the command once more: everything on the disk is as if none had come."""
    chance = workshop.chance(FAMILY, number)
    processes = number % PROCESSES_EVERY == PROCESSES_EVERY - 1
    scenario = scenarios.PROCESSES if processes else SCENARIOS[number % len(SCENARIOS)]
    reference = workshop.reference(scenario, (scenario.command,), finished=False)[0]
    workshop.set_up(scenario, finished=False)
    began, deeds = time.monotonic(), list[str]()
    outcome, detail = _kill_and_repeat(workshop, scenario, reference, chance, deeds)
    deed = f"{scenario.name}: {', '.join(deeds)}"
    line = f"manyformer {' '.join(scenario.command)}"
    return Trial(FAMILY, number, deed, outcome, line, detail, time.monotonic() - began)


def _kill_and_repeat(
    workshop: Workshop, scenario: Scenario, reference: Reference, chance: random.Random, deeds: list[str]
) -> tuple[Outcome, str]:
    """The outcome of signals at random moments, which are noted in `deeds`, and of the command after them."""
    has_workers = scenario is scenarios.PROCESSES
    for _ in range(1 if has_workers else chance.randint(1, 3)):
        running = RunningCommand(scenario.command, workshop.here)
        share = chance.uniform(0, 0.2 if chance.random() < 0.25 else 0.95)
        if running.ended(share * reference.seconds) is not None:
            # a command that has ended writes nothing more; most are slower the first time
            break
        victim = _worker_or_launcher(running.pid, chance) if has_workers else running.pid
        sent = signal.SIGKILL if chance.random() < 0.8 else chance.choice((signal.SIGTERM, signal.SIGINT))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, sent)
        deeds.append(f"{sent.name} {'to the launcher ' if has_workers and victim == running.pid else ''}at {share:.0%}")
        result = running.wait(STOP_SECONDS)
        if result.code is None:
            return "hung", f"no end {STOP_SECONDS:.0f} s after {sent.name}: {result.errors[-300:]}"
        # a command whose worker was killed says so, and ends with the code of a mistake
        if result.code not in (ENDED if victim == running.pid else {*ENDED, 2}) or "Traceback" in result.errors:
            return "crashed", f"exit code {result.code} after {sent.name}: {result.errors[-300:]}"
        if orphans := _orphans_after(workshop.here, 10):
            return "crashed", f"{len(orphans)} processes went on without the one that was killed"
    changed = differing(reference.results, results_of(workshop.here))
    if changed:
        result = workshop.run(scenario.command)
        if result.code != 0:
            return ("hung" if result.code is None else "crashed"), f"{result.code}: {result.errors[-300:]}"
        changed = differing(reference.results, results_of(workshop.here))
    return ("silent", f"not the same: {', '.join(changed)}") if changed else ("harmless", "")


def _worker_or_launcher(launcher: int, chance: random.Random) -> int:
    """The first process or one of those that it has begun, or those."""
    processes = [launcher]
    for process in processes:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                processes += map(int, children.read_text().split())
    return chance.choice(processes)


def _orphans_after(folder: Path, seconds: float) -> list[int]:
    """The processes of the trial that still run after so long, which are then killed."""
    end = time.monotonic() + seconds
    while (processes := left_over_processes(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return processes
