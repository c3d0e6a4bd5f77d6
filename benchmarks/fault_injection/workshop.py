"""The folder of the trials: each begins with a copy of a scenario's folder, always in the same place."""

import hashlib
import json
import random
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sameness.commands import TIMES

from fault_injection.forked_commands import SENTINEL, CommandResult, RunningCommand, Surroundings
from fault_injection.scenarios import Command, Scenario

UNEQUAL_FILES = {"log.txt", "env.json", "metrics.csv", "curves.png", "picture.png", ".lock", ".verified.json"}
"""Files with times or process numbers in them, and pictures of what is compared as numbers."""

LARGEST_RESULT = 1 << 26
"""Of larger files, which only a fault makes, the size alone is compared."""


class DrillError(Exception):
    """The drill itself cannot be carried out: an undisturbed command fails, or is not the same twice."""


@dataclass(frozen=True)
class Reference:
    """What a command says and leaves when nothing disturbs it."""

    output: str
    results: dict[str, str]
    seconds: float


class Workshop:
    """Copies of scenarios below the folder `root`, and what undisturbed commands make of them."""

    def __init__(self, root: Path, seed: int, timeout: float) -> None:
        self.root, self.seed, self.timeout = root.resolve(), seed, timeout
        self.here = self.root / "here"
        self._references: dict[tuple[str, str], list[Reference]] = {}
        self._outputs: dict[tuple[str, str], str] = {}

    @cached_property
    def originals(self) -> Path:
        """The folder of the scenarios as they are before a trial."""
        folder = self.root / "originals"
        folder.mkdir()
        return folder

    @property
    def planted(self) -> str:
        """A line of Python that leaves a file by which it is seen that it ran."""
        return f"open({str(self.root / SENTINEL)!r}, 'w').close()\n"

    def chance(self, *names: object) -> random.Random:
        """Random numbers that depend on the seed and the names alone."""
        return random.Random("/".join(map(str, (self.seed, *names))))

    def run(self, command: Command, surroundings: Surroundings | None = None) -> CommandResult:
        """A command in the folder of the trials, to its end."""
        return RunningCommand(command, self.here, surroundings).wait(self.timeout)

    def run_undisturbed(self, command: Command) -> CommandResult:
        """A command that must succeed."""
        result = self.run(command)
        if result.code != 0:
            raise DrillError(f"without any fault `{result}` ends with {result.code}: {result.output}{result.errors}")
        return result

    def undisturbed_output(self, scenario: Scenario, command: Command, *, finished: bool) -> str:
        """What can be compared of the output of a command that nothing disturbs; carried out once."""
        key = (scenario.name, repr(command))
        if key not in self._outputs:
            self.set_up(scenario, finished=finished)
            self._outputs[key] = comparable_output(self.run_undisturbed(command).output)
        return self._outputs[key]

    def set_up(self, scenario: Scenario, *, finished: bool) -> None:
        """Put a fresh copy of the scenario into `here`, before its command or after it (`finished`)."""
        original = self.original(scenario, finished=finished)
        self.clear()
        shutil.copytree(original, self.here, symlinks=True)

    def original(self, scenario: Scenario, *, finished: bool) -> Path:
        """The folder of the scenario as it is before its command or after it; made when it is first needed."""
        original = self.originals / f"{scenario.name}{'-finished' if finished else ''}"
        if not original.is_dir():
            if finished:
                self.set_up(scenario, finished=False)
                self.run_undisturbed(scenario.command)
            else:
                self.clear()
                self.here.mkdir()
                scenario.write_inputs(self.here)
                for command in scenario.preparation:
                    self.run_undisturbed(command)
            self.here.rename(original)
        return original

    def clear(self) -> None:
        """Remove the folder of the trials."""
        if self.here.exists():
            shutil.rmtree(self.here)

    def reference(self, scenario: Scenario, commands: tuple[Command, ...], *, finished: bool) -> list[Reference]:
        """What undisturbed commands say and leave, one after the other; made twice, and the same twice."""
        key = (scenario.name, repr(commands))
        if key not in self._references:
            first, second = (self._carry_out(scenario, commands, finished=finished) for _ in range(2))
            for command, before, after in zip(commands, first, second):
                if (before.output, before.results) != (after.output, after.results):
                    changed = [name for name in before.results if before.results[name] != after.results.get(name)]
                    raise DrillError(f"`{' '.join(command)}` is not the same twice: {changed or before.output}")
            self._references[key] = second
        return self._references[key]

    def _carry_out(self, scenario: Scenario, commands: tuple[Command, ...], *, finished: bool) -> list[Reference]:
        self.set_up(scenario, finished=finished)
        references = []
        for command in commands:
            result = self.run_undisturbed(command)
            references.append(Reference(comparable_output(result.output), results_of(self.here), result.seconds))
        return references


def comparable_output(output: str) -> str:
    """The output of a command without measured times; nothing but JSON is compared."""
    try:
        return json.dumps(_without_times(json.loads(output)))
    except ValueError:
        return ""


def results_of(folder: Path) -> dict[str, str]:
    """A digest of every file that has the same bytes in every undisturbed repetition, times in JSON left out."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in UNEQUAL_FILES)
    return {str(path.relative_to(folder)): _digest(path) for path in files}


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The files that only one has or that differ."""
    return sorted(name for name in {**before, **after} if before.get(name) != after.get(name))


def changed_results(before: dict[str, str], after: dict[str, str], kept_runs: set[str]) -> list[str]:
    """The files that are a result, not the way to it (checkpoints, prepared data), and differ; `kept` may."""
    return [
        name for name in before if is_final(Path(name)) and name not in kept_runs and before[name] != after.get(name)
    ]


def is_final(name: Path) -> bool:
    """Whether a file is a result of a run, a comparison, a datastore or a conversion."""
    if name.name in ("metrics.jsonl", "result.json", "results.json", "table.md", "table.csv"):
        return True
    return name.parent.name in ("model", "exported", "store") and name.name not in ("README.md", "building.json")


def _digest(path: Path) -> str:
    if path.stat().st_size > LARGEST_RESULT:
        return f"{path.stat().st_size} bytes"
    content = path.read_bytes()
    # the files are compared: their sums are those of times, and of weights whose header has its facts in any order
    if path.name == "manifest.json":
        return "sums"
    try:
        if path.suffix == ".json":
            content = json.dumps(_without_times(json.loads(content))).encode()
        elif path.suffix == ".jsonl":
            rows = [_without_times(json.loads(line)) for line in content.splitlines()]
            content = json.dumps(rows).encode()
        elif path.name == "table.md":
            content = _without_minutes(content.decode()).encode()
        elif path.suffix == ".safetensors":
            # the header's facts stand in another order each time
            start = 8 + int.from_bytes(content[:8], "little")
            content = json.dumps(json.loads(content[8:start]), sort_keys=True).encode() + content[start:]
    except (ValueError, RecursionError):
        pass
    return hashlib.sha256(content).hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        # the sum of a record that holds times is another each time, too
        return {key: _without_times(part) for key, part in value.items() if key not in TIMES and key != "sum"}
    return [_without_times(part) for part in value] if isinstance(value, list) else value


def _without_minutes(table: str) -> str:
    """A table in Markdown without its column of minutes, which a busy machine makes more than 0.0."""
    rows = [line.split("|") for line in table.splitlines()]
    titles = next((row for row in rows if len(row) > 1), [])
    timed = {column for column, title in enumerate(titles) if title.strip().startswith("minutes")}
    return "\n".join("|".join(cell for column, cell in enumerate(row) if column not in timed) for row in rows)
