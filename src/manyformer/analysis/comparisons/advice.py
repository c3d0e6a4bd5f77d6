"""Advice as records: what is asked for, the measured rows, the candidates, and what does not fit.

Nothing here needs torch."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from manyformer.analysis.planning.accelerators import ACCELERATORS
from manyformer.base.errors import UserError

CPU = "cpu"

_MEMORY = re.compile(r"(?P<name>.*?)[\s:,]*(?P<memory>\d+(?:\.\d+)?)\s*GB", re.IGNORECASE)


class TrainingDevice(NamedTuple):
    """What a model is to be trained on: `cpu`, or a GPU; its memory in bytes where that is known."""

    name: str
    memory: float | None

    @property
    def kind(self) -> str:
        """How cards of recipes call it."""
        return "cpu" if self.name == CPU else "cuda"


class AdviceRow(NamedTuple):
    """What was measured of a case: the score of a task, or a time.

    `is_best` says that no other was significantly better; `longest_score` is the score at the greatest length, None
    where there is only one; `state_bytes` those at the requested length. `source` says where the row stands, `spread`
    is the deviation of the seeds."""

    task: str
    case: str
    recipe: str
    score: float
    longest_score: float | None
    is_best: bool
    state_bytes: int | None
    keywords: dict[str, Any]
    measure: str = "accuracy (%)"
    source: str = ""
    spread: float | None = None

    @property
    def value(self) -> str:
        """The score with its unit, and with the deviation of the seeds where it was kept."""
        number = f"{self.score:,.0f}" if abs(self.score) >= 1000 else f"{self.score:.4g}"
        if self.spread:
            number += f" ± {self.spread:.4g}"
        # accuracy (%) is a percentage, and whatever has no unit is named
        name, _, unit = self.measure.partition(" (")
        return f"{number} {unit.removesuffix(')') or name}"


class Candidate(NamedTuple):
    """A recipe to take: why, where that ends, and the measured rows that this rests on, the first of which is `row`.

    `row` is None where nothing was measured of it; `published` are figures of its paper, which were not measured here.
    """

    recipe: str
    reason: str
    row: AdviceRow | None
    rows: tuple[AdviceRow, ...] = ()
    limits: tuple[str, ...] = ()
    published: tuple[str, ...] = ()


class Needs(NamedTuple):
    """What is asked for: the most parameters, bytes of the state of a sequence and minutes; None is no bound."""

    task: str | None
    length: int | None
    parameters: int | None
    memory: int | None
    minutes: float | None
    device: TrainingDevice

    def __str__(self) -> str:
        """In a few words."""
        parts = [self.task or "all tasks of the suite"]
        if self.length is not None:
            parts.append(f"{self.length:,} tokens")
        if self.parameters is not None:
            parts.append(f"at most {self.parameters:,} parameters")
        if self.memory is not None:
            parts.append(f"a state of at most {self.memory / 1000:,.0f} kB")
        if self.minutes is not None:
            parts.append(f"{self.minutes:g} minutes")
        name = "a CPU" if self.device.name == CPU else f"one {self.device.name}"
        memory = f" of {self.device.memory / 1e9:g} GB" if self.device.memory else ""
        return f"{', '.join(parts)}, on {name}{memory}"


@dataclass(frozen=True)
class Advice:
    """Three candidates at most, the best first, all rows that fit, what does not fit and why, and the limits of all.

    `commands` measure the candidates here; `suite` is the name of the suite that the rows are from, if any."""

    needs: Needs
    candidates: tuple[Candidate, ...]
    rows: tuple[AdviceRow, ...]
    excluded: dict[str, str]
    limits: tuple[str, ...]
    commands: tuple[str, ...]
    suite: str | None = None

    def __str__(self) -> str:
        """The candidates with their reasons, and the limits, a line each."""
        lines = [f"for {self.needs}:"]
        lines += [
            f"{number}. {candidate.recipe}: {candidate.reason}" for number, candidate in enumerate(self.candidates, 1)
        ]
        return "\n".join([*lines, *(f"note: {limit}" for limit in self.limits)])


def find_device(device: str) -> TrainingDevice:
    """The device that a text names: `cpu`, `h100`, `rtx-4070 12GB`. Raises UserError for a GPU of unknown memory."""
    text = device.strip()
    memory = None
    if match := _MEMORY.fullmatch(text):
        text = match["name"].strip()
        memory = float(match["memory"]) * 1e9
    name = re.sub(r"[\s_]+", "-", text.lower()) or "gpu"
    if name == CPU:
        return TrainingDevice(CPU, memory)
    accelerator = ACCELERATORS.get(name)
    if memory is None and accelerator is None:
        raise UserError(
            f"--device '{device}': how much memory it has is not known; give that too, such as "
            f"--device 'rtx-4070 12GB', or one of {', '.join([CPU, *ACCELERATORS])}"
        )
    return TrainingDevice(name, memory or (accelerator.memory if accelerator else None))
