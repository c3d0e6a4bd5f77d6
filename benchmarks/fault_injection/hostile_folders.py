"""Folders that somebody wrote on purpose: every sum in them is right, and what they say is not."""

import time

from fault_injection import scenarios
from fault_injection.damage import use_all
from fault_injection.forked_commands import SENTINEL
from fault_injection.hostile_fields import field_attacks
from fault_injection.hostile_files import file_attacks
from fault_injection.outcomes import NotRun, Trial
from fault_injection.resigning import sign_again
from fault_injection.workshop import Workshop

FAMILY = "hostile-folders"
SCENARIOS = (
    scenarios.LANGUAGE,
    scenarios.DATASTORE,
    scenarios.EXPORT,
    scenarios.TRANSLATION,
    scenarios.MEMORY,
    scenarios.COMPARISON,
    scenarios.LABELS,
    scenarios.IMAGES,
    scenarios.TREES,
    scenarios.SOUNDS,
    scenarios.CAPTIONS,
    scenarios.POLICY,
    scenarios.PRUNING,
)
CANARY = "canary_module"
"""A module that lies in the folder of the trial; importing it leaves a file."""


def carry_out(workshop: Workshop, number: int) -> Trial | NotRun:
    """One attack on one scenario; attacks on files and on fields of JSON and YAML take turns, none comes twice."""
    scenario, turn = SCENARIOS[number % len(SCENARIOS)], number // len(SCENARIOS)
    references = workshop.reference(scenario, scenario.uses, finished=True)
    workshop.set_up(scenario, finished=True)
    (workshop.here / f"{CANARY}.py").write_text(workshop.planted)
    attacks = (file_attacks if turn % 2 == 0 else field_attacks)(workshop.here)
    workshop.chance(FAMILY, scenario.name, turn % 2).shuffle(attacks)
    attack = attacks[turn // 2 % len(attacks)]
    outside = sorted(workshop.root.iterdir())
    before = {path: path.read_bytes() for path in workshop.here.rglob("*") if path.is_file()}
    attack.carry_out(workshop.here)
    sign_again(workshop.here, before)
    deed = f"{scenario.name}: {attack.deed}"
    # what a folder says of itself is its own affair, if everything in it is possible
    began = time.monotonic()
    trial = use_all(workshop, FAMILY, number, deed, scenario.uses, references, {attack.file}, own_affair=True)
    if (
        new := set(workshop.root.iterdir())
        - set(outside)
        - {workshop.root / name for name in ("output.txt", "errors.txt", SENTINEL)}
    ):
        names = ", ".join(path.name for path in new)
        return Trial(
            FAMILY, number, deed, "crashed", trial.command, f"written outside: {names}", time.monotonic() - began
        )
    return trial
