"""What a trial can end with, and the table of all."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fault_injection.forked_commands import CommandResult

Outcome = Literal["harmless", "named", "unnamed", "hung", "silent", "crashed", "ran code"]
"""From the best to the worst.

harmless: the results are those of an undisturbed command, bit for bit; named: refused or told in a sentence that names
the file or setting; unnamed: refused without it; hung: no end; silent: another result without a word; crashed: a
traceback, a signal, a message that calls itself a defect; ran code: planted code was carried out.
"""

OUTCOMES: tuple[Outcome, ...] = ("harmless", "named", "unnamed", "hung", "silent", "crashed", "ran code")
FAULTS = OUTCOMES[2:]
LONGEST_MESSAGE = 5_000

# what the escape character and its kin do to a terminal; tabs, line breaks and returns of progress lines do nothing
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x9b]")

TEXT_COMMANDS = {"generate", "translate"}
"""Commands whose standard output is a model's text: it is escaped for a terminal, and left as it is for a file."""

_QUESTION = re.compile(r".{0,60}\[[yY]/[nN]\]")


@dataclass(frozen=True)
class Trial:
    """One trial: what was done, the command that met it, and what came of it."""

    family: str
    number: int
    deed: str
    outcome: Outcome
    command: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.outcome in FAULTS


@dataclass(frozen=True)
class NotRun:
    """A trial that this machine cannot carry out, and why."""

    family: str
    number: int
    reason: str


def judge(
    result: CommandResult, names: Iterable[str], *, same: bool | None, place: str | None = None
) -> tuple[Outcome, str]:
    """The outcome of a command and the reason: `names` would be right in a message, `same` says of a command that
    succeeded whether it has the results of an undisturbed one (None: whatever it says is its own affair). With
    another result a message must also match `place`, a regular expression.
    """
    text = result.output + result.errors
    last_line = (result.errors.strip() or result.output.strip() or "no output").splitlines()[-1][:300]
    if result.ran_code:
        return "ran code", f"planted code was carried out; exit code {result.code}"
    if match := _QUESTION.search(text):
        return "unnamed", f"a library asks on standard input: {match[0]}"
    if result.code is None:
        return "hung", f"no end after {result.seconds:.0f} s; {last_line}"
    if result.code not in (0, 2, 130) or "Traceback (most" in text or "defect of manyformer" in text:
        return "crashed", f"exit code {result.code}: {_error_lines(result) or last_line}"
    messages = result.errors if result.arguments[0] in TEXT_COMMANDS else text
    if match := _CONTROL.search(messages):
        return "unnamed", f"the output has the control character {match[0]!r}"
    named = any(name in text for name in names)
    if result.code == 2:
        if len(result.errors) > LONGEST_MESSAGE:
            return "unnamed", f"a message of {len(result.errors):,} characters: {result.errors[:200]}"
        return "named" if named else "unnamed", _error_lines(result) or last_line
    if same is None or same:
        return "harmless", ""
    is_told = named and (place is None or re.search(place, text) is not None)
    return "named" if is_told else "silent", f"another result; {last_line}"


def _error_lines(result: CommandResult) -> str:
    return " | ".join(line for line in result.errors.splitlines() if line.startswith("error: "))[:500]


def worst(outcomes: Iterable[tuple[Outcome, str, str]]) -> tuple[Outcome, str, str]:
    """The worst of several outcomes with what belongs to them."""
    return max(outcomes, key=lambda outcome: OUTCOMES.index(outcome[0]))


def table(trials: Sequence[Trial | NotRun]) -> str:
    """One row a family, as Markdown."""
    lines = ["| family | tried | " + " | ".join(OUTCOMES) + " | not run |", "| --- |" + " --: |" * (len(OUTCOMES) + 2)]
    rows = {
        family: [trial for trial in trials if trial.family == family]
        for family in dict.fromkeys(trial.family for trial in trials)
    }
    for family, members in {**rows, "all": trials}.items():
        counts = Counter(trial.outcome for trial in members if isinstance(trial, Trial))
        numbers = [counts.total(), *(counts[outcome] for outcome in OUTCOMES), len(members) - counts.total()]
        lines.append(f"| {family} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines)
