"""Every field of every JSON, JSON lines and YAML file of a folder, replaced by what it cannot be."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

VALUES: tuple[Any, ...] = (
    None,
    "text",
    [],
    {},
    -1,
    0,
    True,
    0.5,
    1e308,
    float("nan"),
    10**30,
    2**40,
    "../outside",
    "/dev/zero",
    "O",
    "canary_module",
    "\x1b[31mred\x07",
    "\ud800",
    "x" * 100_000,
    [[[]]] * 3,
)
SAMPLE = 2
"""So many parts of a list, or of a table such as a vocabulary, stand for all."""
LARGEST_RECORD = 30
"""With more keys a JSON object is a table."""


@dataclass(frozen=True)
class Attack:
    """A change to one file of a folder."""

    deed: str
    file: Path
    carry_out: Callable[[Path], object]


def field_attacks(folder: Path) -> list[Attack]:
    """Each value in each field of each file below the folder."""
    attacks = []
    for file in files_to_attack(folder):
        name = file.relative_to(folder)
        if file.suffix in READERS and name.name != "env.json":
            read, _ = READERS[file.suffix]
            for place in places(read(file.read_text(encoding="utf-8"))):
                attacks += [replacement(name, place, value) for value in VALUES]
    return attacks


def files_to_attack(folder: Path) -> list[Path]:
    """The files below the folder, but of the checkpoints of a run the newest alone: the others are hardly ever read."""
    files = sorted(path for path in folder.glob("*/**/*") if path.is_file() and path.name != ".lock")
    newest = {path.parent.parent: path.parent for path in files if path.parent.name.startswith("step-")}
    return [path for path in files if path.parent == newest.get(path.parent.parent, path.parent)]


def replacement(file: Path, place: tuple[Any, ...], value: Any) -> Attack:
    """The attack that puts the value in that place of the file."""

    def carry_out(folder: Path) -> None:
        read, write = READERS[file.suffix]
        whole = read((folder / file).read_text(encoding="utf-8"))
        whole = replaced(whole, place, value)
        if isinstance(whole, dict) and place[:1] != ("sum",):
            # a record without a sum is read as one that a person has written
            whole.pop("sum", None)
        (folder / file).write_text(write(whole), encoding="utf-8", errors="surrogatepass")

    where = ".".join(map(str, place)) or "the whole"
    return Attack(f"{file}: {where} = {repr(value)[:40]}", file, carry_out)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a value of JSON, of which the whole is the first."""
    yield place
    if isinstance(value, dict):
        for key, part in list(value.items())[: None if len(value) <= LARGEST_RECORD else SAMPLE]:
            yield from places(part, (*place, key))
    elif isinstance(value, list):
        for index, part in enumerate(value[:SAMPLE]):
            yield from places(part, (*place, index))


def replaced(whole: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The whole with another value in a place."""
    if not place:
        return value
    copy = dict(whole) if isinstance(whole, dict) else list(whole)
    copy[place[0]] = replaced(copy[place[0]], place[1:], value)
    return copy


def _read_lines(text: str) -> Any:
    return [json.loads(line) for line in text.splitlines()]


def _write_lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows) if isinstance(rows, list) else json.dumps(rows)


READERS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    ".json": (json.loads, json.dumps),
    ".jsonl": (_read_lines, _write_lines),
    ".yaml": (yaml.safe_load, lambda value: yaml.safe_dump(value, allow_unicode=False)),
}
