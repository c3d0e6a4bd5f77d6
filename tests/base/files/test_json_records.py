"""JSON files are bounded, typed and of a known format; every refusal names the file and the field."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from manyformer.base import VERSION
from manyformer.base.errors import UserError
from manyformer.base.files import json_records
from manyformer.base.files.json_records import Count, DamagedFile, FileName, FileRecord, Sha256


class ExampleRecord(FileRecord):
    """A record with one field of each restricted type."""

    title = "an example"
    format_number = 3
    count: Count
    name: FileName
    digest: Sha256
    score: float


FIELDS = {"count": 2, "name": "a/b.txt", "digest": "0" * 64, "score": 0.5}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "example.json"


def test_a_record_comes_back_as_it_was_written(file: Path) -> None:
    for score in (0.1 + 0.2, float("inf"), -0.0):
        record = ExampleRecord(**{**FIELDS, "score": score})
        record.write(file)
        assert ExampleRecord.read(file) == record
    content = json.loads(file.read_text())
    assert (content["format"], content["manyformer"]) == (3, VERSION)


def test_every_flipped_bit_is_named(file: Path) -> None:
    ExampleRecord(**FIELDS).write(file)
    written = file.read_bytes()
    for position in range(8 * len(written)):
        content = bytearray(written)
        content[position // 8] ^= 1 << position % 8
        file.write_bytes(content)
        try:
            # another space changes nothing
            message, same = "", ExampleRecord.read(file) == ExampleRecord(**FIELDS)
        except UserError as refusal:
            message, same = str(refusal), False
        assert same or str(file) in message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("count", -1, "count: input should be greater than or equal to 0, got -1"),
        ("count", "2", "count: input should be a valid integer, got '2'"),
        ("count", True, "count: input should be a valid integer, got True"),
        ("count", 2.0, "count: input should be a valid integer, got 2.0"),
        ("count", 10**30, "count: the number is greater than 9,223,372,036,854,775,807"),
        ("name", "../a", "name: the name of a file inside the folder is needed, got '../a'"),
        ("name", "/a", "name: the name of a file inside the folder is needed"),
        ("name", "a\\b", "name: the name of a file inside the folder is needed"),
        ("name", "", "name: the name of a file inside the folder is needed"),
        ("name", "a//b", "name: the name of a file inside the folder is needed"),
        ("digest", "O", "digest: string should match pattern"),
        ("score", None, "score: input should be a valid number, got None"),
        ("score", [], "score: input should be a valid number"),
        ("surplus", 1, "surplus: extra inputs are not permitted"),
    ],
)
def test_a_bad_field_is_named(field: str, value: Any, message: str, file: Path) -> None:
    file.write_text(json.dumps({"format": 3, **FIELDS, field: value}))
    with pytest.raises(DamagedFile) as refusal:
        ExampleRecord.read(file)
    assert str(refusal.value).startswith(f"{file} is damaged: {message}")


@pytest.mark.parametrize("format_number", [99, None, "3", 3.0, True, -1, []])
def test_another_format_is_refused_with_the_version_that_wrote_it(format_number: Any, file: Path) -> None:
    file.write_text(json.dumps({"format": format_number, "manyformer": "7.0", **FIELDS}))
    with pytest.raises(UserError, match=r"written in format .* by manyformer '7\.0'; .* reads format 3 of an example"):
        ExampleRecord.read(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty, and not an example"),
        (b"[1, 2]", "it is not an example"),
        (b'{"format": 3', "it is not an example"),
        (b"[" * 10**5, "recursion limit"),
        (b"\xff\xfe{}", "it is not an example"),
        (b'{"format": ' + b"9" * 10**5 + b"}", "it is not an example"),
    ],
)
def test_what_is_no_record_is_refused(content: bytes, message: str, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(DamagedFile, match=f"is damaged: .*{message}"):
        ExampleRecord.read(file)


def test_only_regular_files_of_bounded_size_are_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DamagedFile, match=r"example\.json is missing"):
        ExampleRecord.read(file)
    os.mkfifo(file)
    with pytest.raises(DamagedFile, match="is a device or pipe, not a file"):
        ExampleRecord.read(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(DamagedFile, match="is a folder, not a file"):
        ExampleRecord.read(file)
    file.rmdir()
    monkeypatch.setattr(ExampleRecord, "max_bytes", 10)
    file.write_text(json.dumps({"format": 3, **FIELDS}))
    with pytest.raises(DamagedFile, match="and at most 10 are expected"):
        ExampleRecord.read(file)


def test_the_default_bound_is_small_beside_memory() -> None:
    assert json_records.MAX_JSON_BYTES <= 1 << 26
