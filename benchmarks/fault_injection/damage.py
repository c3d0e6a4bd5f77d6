"""Damage to every file of runs, datastores, comparisons and models, and everything that is then done with them."""

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from fault_injection import scenarios
from fault_injection.outcomes import NotRun, Trial, judge, worst
from fault_injection.scenarios import Command
from fault_injection.workshop import Reference, Workshop, changed_results, comparable_output, results_of

FAMILY = "damage"
SCENARIOS = (
    scenarios.LANGUAGE,
    scenarios.DATASTORE,
    scenarios.MEMORY,
    scenarios.COMPARISON,
    scenarios.TRANSLATION,
    scenarios.EXPORT,
    scenarios.IMAGES,
    scenarios.TREES,
    scenarios.SOUNDS,
    scenarios.CAPTIONS,
    scenarios.POLICY,
    scenarios.PRUNING,
    scenarios.LABELS,
)


def flip_a_bit(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes() or b"\0")
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def zero_a_half(file: Path, chance: random.Random) -> None:
    content = file.read_bytes()
    middle = len(content) // 2
    zeros = bytes(middle)
    file.write_bytes(
        content[:middle] + bytes(len(content) - middle) if chance.random() < 0.5 else zeros + content[middle:]
    )


def truncate(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(max(1, file.stat().st_size)))


def empty(file: Path, chance: random.Random) -> None:
    os.truncate(file, 0)


def append_bytes(file: Path, chance: random.Random) -> None:
    with file.open("ab") as stream:
        stream.write(chance.randbytes(chance.randint(1, 64)))


def delete(file: Path, chance: random.Random) -> None:
    file.unlink()


def replace_by_folder(file: Path, chance: random.Random) -> None:
    file.unlink()
    file.mkdir()


def replace_by_pipe(file: Path, chance: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_a_bit,
    zero_a_half,
    truncate,
    empty,
    append_bytes,
    delete,
    replace_by_folder,
    replace_by_pipe,
)


def files_of(folder: Path) -> list[Path]:
    """The files that manyformer has written there, relative to it."""
    inputs = {path for path in folder.iterdir() if path.is_file()}
    files = {path for path in folder.rglob("*") if path.is_file()} - inputs
    return sorted(path.relative_to(folder) for path in files if path.name != ".lock")


def carry_out(workshop: Workshop, number: int) -> Trial | NotRun:
    """One damage to one file; each file of a scenario meets each damage once before any comes again."""
    scenario, turn = SCENARIOS[number % len(SCENARIOS)], number // len(SCENARIOS)
    references = workshop.reference(scenario, scenario.uses, finished=True)
    workshop.set_up(scenario, finished=True)
    files = files_of(workshop.here)
    plan = [(file, damage) for file in files for damage in (*DAMAGES, None)]
    workshop.chance(FAMILY, scenario.name).shuffle(plan)
    file, damage = plan[turn % len(plan)]
    chance = workshop.chance(FAMILY, number)
    if damage is None:
        other = chance.choice([name for name in files if name != file and name.suffix == file.suffix] or files)
        swap(workshop.here / file, workshop.here / other)
        return use_all(workshop, FAMILY, number, f"swap {file} and {other}", scenario.uses, references, {file, other})
    damage(workshop.here / file, chance)
    deed = f"{damage.__name__.replace('_', ' ')}: {file}"
    return use_all(workshop, FAMILY, number, deed, scenario.uses, references, {file})


def swap(file: Path, other: Path) -> None:
    """Exchange the contents of two files."""
    aside = file.with_name("aside")
    shutil.move(file, aside)
    if other != file:
        shutil.move(other, file)
    shutil.move(aside, other)


def use_all(
    workshop: Workshop,
    family: str,
    number: int,
    deed: str,
    uses: tuple[Command, ...],
    references: list[Reference],
    files: set[Path],
    *,
    own_affair: bool = False,
) -> Trial:
    """All commands one after the other in the damaged folder; the trial is as good as the worst of them.

    With `own_affair` a command that succeeds may have other results.
    """
    began = time.monotonic()
    names = {part for file in files for part in (file.name, *_whole_of(file))}
    outcomes = []
    for command, reference in zip(uses, references):
        result = workshop.run(command)
        changed = ["its output"] if comparable_output(result.output) != reference.output else []
        if result.code == 0 and command == uses[-1]:
            # only training writes the files of a run anew: elsewhere a damaged file stays as it is
            kept = set[str]() if command[0] == "train" else set(map(str, files))
            changed += changed_results(reference.results, results_of(workshop.here), kept)
        same = own_affair or not changed
        outcome, detail = judge(result, names, same=same)
        detail = f"{', '.join(changed)}: {detail}" if changed and result.code == 0 else detail
        outcomes.append((outcome, detail, str(result)))
    outcome, detail, command_line = worst(outcomes)
    return Trial(family, number, deed, outcome, command_line, detail, time.monotonic() - began)


def _whole_of(file: Path) -> list[str]:
    """What is as right in a message as the file's name: the folder of a checkpoint, which is set aside as a whole, and
    the setting of recordings, which are one data set."""
    return [part for part in file.parts if part.startswith("step-")] + ["data.path"] * (file.suffix == ".wav")
