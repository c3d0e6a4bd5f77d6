"""The waits of each recipe that are stated in docs/host_reads.json, and what is said where others are found."""

import json
from pathlib import Path
from typing import Any

from pretended_device.waits import Wait

FILE = Path(__file__).parents[2] / "docs" / "host_reads.json"
COMMAND = "python benchmarks/host_reads.py --write"

COUNTED_JOBS = ("training", "packed rows", "decoding", "static steps")
"""The jobs whose waits are stated: those of a training step, also with packed rows, and of one more token."""

WORDS = {
    "training": "a training step of {}",
    "packed rows": "a training step of {} with packed rows",
    "decoding": "a decoded token of {}",
    "static steps": "a token that {} decodes by static steps",
}


def read() -> dict[str, Any]:
    """For each job the recipes that wait, with their waits by place; and the reason of each place."""
    record: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return record


def as_json(waits: dict[Wait, float]) -> dict[str, float]:
    """Waits by "place: kind", as they stand in the file."""
    return {str(wait): round(number, 4) for wait, number in sorted(waits.items())}


def difference(recipe: str, job: str, waits: dict[Wait, float], stated: dict[str, Any]) -> str:
    """A sentence about waits that are not as stated, or ""."""
    found, expected = as_json(waits), stated[job].get(recipe, {})
    changes = [
        f"{wait} ({expected.get(wait, 0):g} -> {found.get(wait, 0):g})"
        for wait in sorted({*found, *expected})
        if found.get(wait) != expected.get(wait)
    ]
    if not changes:
        return ""
    return (
        f"{WORDS[job].format(recipe)} waits {sum(found.values()):g} times for the device, and docs/{FILE.name} says "
        f"{sum(expected.values()):g}: {'; '.join(changes)}. Each stalls a GPU: remove it, or state it by `{COMMAND}`"
    )
