"""The JSON of `gpu.py`: every finished item is kept, so that the same command goes on where it stopped."""

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_parts.outcome import Outcome, Setting
from manyformer.base import VERSION
from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write_text
from manyformer.base.files.json_records import read_json, validate_json

FORMAT = 1
CHECKOUT = Path(__file__).resolve().parents[2]


class KeptItem(NamedTuple):
    """The outcome of an item, how long it took, when, and the commit that it was measured at."""

    verdict: str
    sentence: str
    numbers: dict[str, float]
    paths: list[str]
    seconds: float
    commit: str
    date: str

    @classmethod
    def of(cls, outcome: Outcome, seconds: float) -> "KeptItem":
        """The record of an outcome now."""
        numbers, paths = dict(outcome.numbers), list(outcome.paths)
        date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        # places in the sources are told as in a checkout, wherever this one lies
        sentence = outcome.sentence.replace(f"{CHECKOUT}/", "")
        return cls(outcome.verdict, sentence, numbers, paths, round(seconds, 2), "", date)

    @property
    def told(self) -> str:
        """The sentence with the numbers."""
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.numbers.items())
        return f"{self.sentence} [{numbers}]" if numbers else self.sentence


class MachineResults(NamedTuple):
    """What one machine has found."""

    machine: dict[str, Any]
    items: dict[str, KeptItem]


def read_results(path: Path) -> MachineResults:
    """The results in a file. Raises UserError for another or a damaged file."""
    content = read_json(path, "a result of gpu.py")
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("machine"), dict):
        raise UserError(f"{path} is not a result of gpu.py in format {FORMAT}; give another --out")
    items = validate_json(content.get("items"), dict[str, KeptItem], path)
    return MachineResults(content["machine"], items)


class KeptResults:
    """The items in a file, which belong to one machine. Raises UserError for the file of another one."""

    def __init__(self, path: Path, setting: Setting, commit: str | None = None) -> None:
        self.path, self.machine = path, machine_of(setting)
        self.items: dict[str, KeptItem] = {}
        self._commit = commit or commit_of_checkout()
        if path.exists():
            self._read()

    def _read(self) -> None:
        machine, items = read_results(self.path)
        if machine != self.machine:
            raise UserError(f"{self.path} was measured on {machine}, and this is {self.machine}; give another --out")
        self.items = items

    def as_machine(self) -> MachineResults:
        """All that is kept."""
        return MachineResults(self.machine, self.items)

    def add(self, name: str, item: KeptItem) -> None:
        """Keep an item, on the disk as well."""
        self.items[name] = item._replace(commit=self._commit)
        kept = {name: each._asdict() for name, each in self.items.items()}
        content: dict[str, Any] = {"format": FORMAT, "machine": self.machine, "items": kept}
        atomic_write_text(self.path, json.dumps(content, indent=1) + "\n")

    def remaining(self, names: list[str]) -> list[str]:
        """Those that are not finished, in order; failed ones are run again, after all that have not been run."""
        return [name for name in names if name not in self.items] + [
            name for name in names if name in self.items and self.items[name].verdict == "failed"
        ]


def machine_of(setting: Setting) -> dict[str, Any]:
    """What decides whether numbers can stand in one table."""
    on_gpu = setting.on_gpu
    return {
        "device": torch.cuda.get_device_name(setting.device) if on_gpu else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "manyformer": VERSION,
        "rehearsal": setting.tiny,
    }


def commit_of_checkout() -> str:
    """The commit of this checkout, with a + if files differ from it; empty outside of one."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
