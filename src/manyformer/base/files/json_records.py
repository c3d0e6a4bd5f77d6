"""JSON files as typed records: bounded in size and depth, with a format number, every field checked when it is read.

`FileRecord` is one record in a file. `JsonLines` is a record in each line of a file that is only appended to, so that
those of several machines can be joined."""

import copy
import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Protocol, Self, TypeVar

import pydantic_core
from annotated_types import Ge, Gt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PlainSerializer,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from manyformer.base import VERSION
from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import append_bytes, atomic_write_text, make_folder
from manyformer.base.files.json_text import NAMED_NUMBERS, json_text, with_named_numbers

MAX_JSON_BYTES = 1 << 26
"""The largest JSON file that is read, in bytes, where a reader does not allow more."""

MAX_LINES_BYTES = 1 << 28
"""The largest file of lines that is read, in bytes."""

MAX_INT = (1 << 63) - 1
"""The largest whole number in a record: what 64 bits hold."""

NUMBER_ERRORS = {"float_type", "float_parsing", "int_type"}
"""The kinds of validation errors of text in the place of a number."""

VERSION_FIELD = "manyformer"
FORMAT_FIELD = "format"
SUM_FIELD = "sum"


class DamagedFile(UserError):
    """A file that is missing, is not as it was written, or does not hold what its place in a folder promises."""


def _check_int64(number: int) -> int:
    if number > MAX_INT:
        raise ValueError(f"the number is greater than {MAX_INT:,}")
    return number


def _check_file_name(name: str) -> str:
    # a file of the folder itself or of a folder inside: nothing that could lead out of it
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or "\0" in name or {"", ".", ".."} & set(parts):
        raise ValueError("the name of a file inside the folder is needed")
    return name


Count = Annotated[int, Ge(0), AfterValidator(_check_int64)]
"""A number of things, 0 or more."""
PositiveCount = Annotated[int, Gt(0), AfterValidator(_check_int64)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, AfterValidator(_check_file_name)]
"""The name of a file relative to its folder, with `/` between parts; never a path that leads out of the folder."""
AS_OBJECT = PlainSerializer(lambda record: record._asdict())
"""Annotates a named tuple that a file holds as an object with the names of its fields, not as a list."""


class FileRecord(BaseModel):
    """The content of a JSON file that this library writes and reads again; subclasses declare the fields.

    The file also holds the number of its format, the version of manyformer that wrote it, and a sum of its content
    against damage. A file without the sum is read too, so that people can edit one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    title: ClassVar[str]
    """What the file is, for messages: "the description of a model"."""
    format_number: ClassVar[int] = 1
    max_bytes: ClassVar[int] = MAX_JSON_BYTES

    def write(self, path: Path) -> None:
        """Write the record atomically."""
        values = with_named_numbers(self.model_dump(mode="json"))
        content = {FORMAT_FIELD: self.format_number, VERSION_FIELD: VERSION, **values}
        content[SUM_FIELD] = _content_sum(content)
        text = pydantic_core.to_json(content, indent=1).decode()
        atomic_write_text(path, f"{text}\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record in a file. Raises DamagedFile, and UserError for a file of another format."""
        content = read_json(path, cls.title, max_bytes=cls.max_bytes)
        if not isinstance(content, dict):
            raise DamagedFile(f"{path} is damaged: it is not {cls.title}")
        # the sum is that of all other fields
        expected = content.pop(SUM_FIELD, None)
        actual = _content_sum(content)
        number = content.pop(FORMAT_FIELD, None)
        version = content.pop(VERSION_FIELD, None)
        # `True` equals 1 and is no format
        if type(number) is not int or number != cls.format_number:
            by = ""
            if isinstance(version, str):
                by = f" by manyformer {version!r:.40}"
            message = f"{path} was written in format {number!r:.40}{by}"
            raise UserError(f"{message}; this version of manyformer reads format {cls.format_number} of {cls.title}")
        if expected not in (None, actual):
            raise DamagedFile(f"{path} is damaged: it is not as it was written (its {SUM_FIELD} differs)")
        record: Self = validate_json(content, cls, path)
        return record


def _content_sum(content: Mapping[str, Any]) -> str:
    """The first digits of the SHA-256 of JSON values, whatever their order and spelling in a file."""
    # written and parsed, so that tuples are lists, and a number is what a reader makes of it; version 0.2.0 has summed
    # numbers that are not finite as constants
    values = pydantic_core.from_json(pydantic_core.to_json(content, inf_nan_mode="constants"), allow_inf_nan=True)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def special_kind(path: Path) -> str | None:
    """What is at the path, in words, if it is neither a regular file nor a folder; None too if there is nothing."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    if stat.S_ISFIFO(mode):
        return "a pipe, which can be read only once"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"


def read_bounded(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a regular file. Raises DamagedFile where it is missing, no regular file, or larger than allowed."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedFile(f"{path} is missing") from None
    # reading a pipe or a device could wait forever
    if not stat.S_ISREG(status.st_mode):
        raise DamagedFile(f"{path} is a {'folder' if stat.S_ISDIR(status.st_mode) else 'device or pipe'}, not a file")
    if status.st_size > max_bytes:
        raise DamagedFile(f"{path} is damaged: it has {status.st_size:,} bytes, and at most {max_bytes:,} are expected")
    return path.read_bytes()


def read_json(path: Path, title: str, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file of at most `max_bytes`; `title` says what it should be. Raises DamagedFile."""
    return parse_json(read_bounded(path, max_bytes), path, title)


def parse_json(data: bytes, location: object, title: str) -> Any:
    """The value of a JSON text. Raises DamagedFile with the location; depth is limited by the parser."""
    if not data:
        raise DamagedFile(f"{location} is damaged: it is empty, and not {title}")
    try:
        return pydantic_core.from_json(data, allow_inf_nan=True)
    except ValueError as error:
        raise DamagedFile(f"{location} is damaged: it is not {title} ({error})") from None


def validate_json(content: Any, kind: Any, location: object) -> Any:
    """`content`, parsed from JSON, as a value of the type `kind`. Raises DamagedFile that names the first bad field.

    Where the type has a number, the names of numbers that are not finite stand for them (see `with_named_numbers`), and
    the constants NaN and Infinity, which version 0.2.0 has written.
    """
    adapter = TypeAdapter(kind)
    try:
        try:
            return _validate(adapter, content)
        except ValidationError as error:
            number_places = [
                details["loc"]
                for details in error.errors(include_url=False)
                if details["type"] in NUMBER_ERRORS and _is_named_number(details["input"])
            ]
            if not number_places:
                raise
            content = copy.deepcopy(content)
            for place in number_places:
                _restore_number(content, place)
            return _validate(adapter, content)
    except (ValidationError, ValueError) as error:
        raise DamagedFile(f"{location} is damaged: {_first_problem(error)}") from None


def _validate(adapter: TypeAdapter[Any], content: Any) -> Any:
    # as JSON text, because lists stand for tuples there even in strict mode
    return adapter.validate_json(pydantic_core.to_json(content, inf_nan_mode="constants"), strict=True)


def _is_named_number(value: object) -> bool:
    return isinstance(value, str) and value in NAMED_NUMBERS


def _restore_number(content: Any, place: tuple[int | str, ...]) -> None:
    """Replace the name of a number at this place of a validation error by the number."""
    for part in place:
        # the place also names the member of a union that was tried, which is no part of the content
        is_index = isinstance(content, list) and isinstance(part, int) and part < len(content)
        if not (is_index or (isinstance(content, dict) and part in content)):
            continue
        value = content[part]
        if isinstance(value, str):
            content[part] = NAMED_NUMBERS.get(value, value)
            return
        content = value


def _first_problem(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    details = error.errors(include_url=False)[0]
    field = ".".join(f"{part:.40}" if isinstance(part, str) else str(part) for part in details["loc"])
    message = details["msg"].removeprefix("Value error, ")
    if isinstance(details["input"], Mapping | list):
        shown = ""
    else:
        shown = f", got {details['input']!r:.60}"
    if field:
        return f"{field}: {message[:1].lower()}{message[1:]}{shown}"
    return f"{message}{shown}"


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
        # a line without its end was being written when the process was killed
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
