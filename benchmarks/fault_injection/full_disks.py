"""Disks that become full or cannot be written, and the same command when there is room again."""

import os
import shutil
import subprocess
import time
from pathlib import Path

from fault_injection import scenarios
from fault_injection.forked_commands import CommandResult, Surroundings
from fault_injection.outcomes import NotRun, Outcome, Trial, judge
from fault_injection.scenarios import Scenario
from fault_injection.workshop import Reference, Workshop, differing, results_of

FAMILY = "full-disks"
SCENARIOS = (
    scenarios.LANGUAGE,
    scenarios.DATASTORE,
    scenarios.COMPARISON,
    scenarios.TRANSLATION,
    scenarios.EXPORT,
    scenarios.MEMORY,
    scenarios.PRUNING,
    scenarios.TO_HUGGING_FACE,
    scenarios.FOREIGN,
)
FAULTS = ("small disk", "file size limit", "read-only disk", "small disk", "read-only after")


def carry_out(workshop: Workshop, number: int) -> Trial | NotRun:
    """One disk without room at a random place of the way, then the same command with room: the same results."""
    chance = workshop.chance(FAMILY, number)
    scenario, fault = SCENARIOS[number % len(SCENARIOS)], FAULTS[(number // len(SCENARIOS)) % len(FAULTS)]
    reference = workshop.reference(scenario, (scenario.command,), finished=False)[0]
    sizes = [_size(workshop.original(scenario, finished=finished)) for finished in (False, True)]
    finished = fault == "read-only after"
    command = scenario.uses[0] if finished else scenario.command
    workshop.set_up(scenario, finished=finished)
    began = time.monotonic()
    if fault == "file size limit":
        limit = chance.randint(1, _largest_file(workshop.original(scenario, finished=True)))
        deed, result = f"no file longer than {limit:,} bytes", workshop.run(command, Surroundings(file_size=limit))
    else:
        room = chance.randint(0, sizes[1] - sizes[0])
        deed = f"a disk with {room:,} bytes left" if fault == "small disk" else "a read-only disk"
        if not mount(workshop.here, sizes[0] + room if fault == "small disk" else 1 << 30):
            return NotRun(FAMILY, number, "file systems cannot be mounted here: it needs root")
        if fault != "small disk":
            remount(workshop.here, "ro")
        result = workshop.run(command)
        remount(workshop.here, "rw,size=1g")
    # a message is right if it names the folder that could not be written
    outcome, detail = judge(result, {scenario.written}, same=None)
    if outcome in ("named", "harmless"):
        outcome, detail = _judge_with_room(workshop, scenario, reference, result, finished, (outcome, detail))
    unmount(workshop.here)
    line = f"manyformer {' '.join(command)}"
    return Trial(FAMILY, number, f"{scenario.name}: {deed}", outcome, line, detail, time.monotonic() - began)


def _judge_with_room(
    workshop: Workshop,
    scenario: Scenario,
    reference: Reference,
    result: CommandResult,
    finished: bool,
    judged: tuple[Outcome, str],
) -> tuple[Outcome, str]:
    """The same command with room again, unless it has succeeded: the results must be those of an undisturbed one."""
    if result.code != 0 and not finished:
        result = workshop.run(scenario.command)
        if result.code != 0:
            return "crashed", f"with room again it ends with {result.code}: {result.errors[-300:]}"
    changed = differing(reference.results, results_of(workshop.here))
    return ("silent", f"not the same with room again: {', '.join(changed)}") if changed else judged


def _size(folder: Path) -> int:
    """The size that a folder takes in whole pages."""
    return sum((path.lstat().st_size + 4095) // 4096 * 4096 + 4096 for path in folder.rglob("*"))


def _largest_file(folder: Path) -> int:
    return max(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def mount(folder: Path, size: int) -> bool:
    """Put the folder on a disk in memory of its own; False if that is not allowed."""
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.mkdir()
    mounted = _do("mount", "-t", "tmpfs", "-o", f"size={size + 65536}", "none", str(folder))
    shutil.copytree(aside, folder, dirs_exist_ok=True, symlinks=True)
    shutil.rmtree(aside)
    return mounted


def remount(folder: Path, options: str) -> None:
    """Change the options of the disk that the folder is on."""
    _do("mount", "-o", f"remount,{options}", str(folder))


def unmount(folder: Path) -> None:
    """Take the folder's own disk away, if it has one."""
    if os.path.ismount(folder):
        _do("umount", str(folder))


def _do(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
