"""Files of typed records, one JSON object a line: only appended to, so that those of several machines can be joined."""

from pathlib import Path
from typing import Generic, Protocol, TypeVar

import pydantic_core

from manyformer.files.atomic_files import append_bytes, make_folder
from manyformer.files.json_records import parse_json, read_bounded, validate_json
from manyformer.files.json_text import json_text, with_named_numbers

MAX_LINES_BYTES = 1 << 28
"""The largest file that is read, in bytes."""


class Keyed(Protocol):
    """A record with a key, by which a later line takes the place of an earlier one."""

    @property
    def key(self) -> str: ...


RecordT = TypeVar("RecordT", bound=Keyed)


class JsonLines(Generic[RecordT]):
    """The records of type `kind` in a file, by their keys; `title` says in messages what a line should be.

    An incomplete last line, of a process that was killed, is dropped. Raises DamagedFile for any other line that is no
    such record."""

    def __init__(self, path: Path, kind: type[RecordT], title: str) -> None:
        self.path = path
        self.entries: dict[str, RecordT] = {}
        text = b""
        if path.exists():
            text = read_bounded(path, MAX_LINES_BYTES)
        complete, _, rest = text.rpartition(b"\n")
        for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
            location = f"{path}:{number}"
            entry: RecordT = validate_json(parse_json(line, location, title), kind, location)
            self.entries[entry.key] = entry
        self._incomplete_bytes = len(rest)

    def add(self, entry: RecordT) -> None:
        """Append a record to the file."""
        make_folder(self.path.parent)
        content = with_named_numbers(pydantic_core.to_jsonable_python(entry, inf_nan_mode="constants"))
        line = json_text(content).encode() + b"\n"
        append_bytes(self.path, line, drop=self._incomplete_bytes)
        self._incomplete_bytes = 0
        self.entries[entry.key] = entry
