"""Files that are not what they say: headers of tensors, prepared tokens, links, and text that is no JSON."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fault_injection.hostile_fields import Attack, files_to_attack

Header = dict[str, Any]
FileChange = Callable[[Path], object]


def file_attacks(folder: Path) -> list[Attack]:
    """Each attack on each file of its kind below the folder, and each link and each text in the place of any file."""
    attacks = []
    for file in files_to_attack(folder):
        changes = {**TEXTS, **LINKS} if file.suffix in (".json", ".jsonl", ".yaml") else LINKS
        changes = {**changes, **CHANGES.get(file.suffix, {})}
        attacks += [_attack(file.relative_to(folder), deed, change) for deed, change in changes.items()]
    return attacks


def _attack(file: Path, deed: str, change: FileChange) -> Attack:
    return Attack(f"{file}: {deed}", file, lambda folder: change(folder / file))


def header_change(change: Callable[[Header, str], object]) -> FileChange:
    """A change of the header of a safetensors file: the function gets it and the name of the largest tensor."""

    def apply(file: Path) -> None:
        content = file.read_bytes()
        start = 8 + struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:start])
        names = [name for name in header if name != "__metadata__"]
        change(header, max(names, key=lambda name: header[name]["data_offsets"][1] - header[name]["data_offsets"][0]))
        _write(file, json.dumps(header).encode(), content[start:])

    return apply


def _write(file: Path, header: bytes, tensors: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + tensors)


def header_length(length: int) -> FileChange:
    """Another length of the header than it has."""
    return lambda file: file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])


def set_entry(key: str, value: object) -> FileChange:
    """Another value of a tensor's entry in the header."""
    return header_change(lambda header, name: header[name].update({key: value}))


def rename_tensor(header: Header, name: str) -> None:
    header["another" + name] = header.pop(name)


def overlap_tensors(header: Header, name: str) -> None:
    other = next(entry for key, entry in header.items() if key not in ("__metadata__", name))
    other["data_offsets"] = header[name]["data_offsets"]


def transpose_tensor(header: Header, name: str) -> None:
    header[name]["shape"] = [1, *header[name]["shape"][::-1]]


def fill_tensors(value: float) -> FileChange:
    """The same number in all tensors, as float32."""

    def apply(file: Path) -> None:
        content = file.read_bytes()
        start = 8 + struct.unpack("<Q", content[:8])[0]
        count = (len(content) - start) // 4
        rest = content[start + 4 * count :]
        file.write_bytes(content[:start] + np.full(count, value, np.float32).tobytes() + rest)

    return apply


def numbers(type_: str, change: Callable[[np.ndarray], object]) -> FileChange:
    """A change of a file of whole numbers."""

    def apply(file: Path) -> None:
        values = np.frombuffer(file.read_bytes(), type_).copy()
        if len(values):
            change(values)
        file.write_bytes(values.tobytes())

    return apply


def link_to(target: str) -> FileChange:
    """A link in the place of the file."""

    def apply(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return apply


def link_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def text(content: str | bytes) -> FileChange:
    """Another content."""
    return lambda file: file.write_bytes(content.encode() if isinstance(content, str) else content)


def prefix(mark: bytes) -> FileChange:
    """Bytes before the content."""
    return lambda file: file.write_bytes(mark + file.read_bytes())


def in_utf16(file: Path) -> None:
    file.write_bytes(file.read_text(encoding="utf-8").encode("utf-16"))


def sparse_gigabytes(file: Path) -> None:
    os.truncate(file, 1 << 36)


CHANGES: dict[str, dict[str, FileChange]] = {
    ".safetensors": {
        "a header of 10^18 bytes": header_length(10**18),
        "a header longer than the file": header_length(10**6),
        "a header of no bytes": header_length(0),
        "a header of 2^64 - 1 bytes": header_length(2**64 - 1),
        "a header that is no JSON": lambda file: _write(file, b"{" * 100, b""),
        "a header nested deep": lambda file: _write(file, b'{"a":' * 100_000, b""),
        "no tensor": lambda file: _write(file, b"{}", b""),
        "numbers of type F64": set_entry("dtype", "F64"),
        "numbers of type I64": set_entry("dtype", "I64"),
        "numbers of type BOOL": set_entry("dtype", "BOOL"),
        "numbers of type O": set_entry("dtype", "O"),
        "a shape of 10^12": set_entry("shape", [10**12]),
        "a shape of -1": set_entry("shape", [-1]),
        "an empty shape": set_entry("shape", []),
        "a shape that overflows": set_entry("shape", [2**32, 2**32]),
        "a shape of a thousand ones": set_entry("shape", [1] * 1000),
        "another shape": header_change(transpose_tensor),
        "places that go backwards": set_entry("data_offsets", [8, 0]),
        "places beyond the end": set_entry("data_offsets", [0, 10**15]),
        "places below zero": set_entry("data_offsets", [-4, 0]),
        "two tensors in one place": header_change(overlap_tensors),
        "another name of a tensor": header_change(rename_tensor),
        "a tensor less": header_change(lambda header, name: header.pop(name)),
        "a tensor more": header_change(
            lambda header, name: header.update(more={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
        ),
        "facts that are numbers": header_change(lambda header, name: header.update(__metadata__={"a": 1})),
        "aliases that are names of nothing": header_change(
            lambda header, name: header.update(__metadata__={"a": "nothing", name: "../x"})
        ),
        "not a number everywhere": fill_tensors(float("nan")),
        "infinity everywhere": fill_tensors(float("inf")),
        "64 GiB of nothing behind it": sparse_gigabytes,
    },
    ".tokens": {
        "tokens beyond the vocabulary": numbers("u1", lambda values: values.fill(255)),
        "one token beyond the vocabulary": numbers("u1", lambda values: values.put(len(values) // 2, 250)),
        "64 GiB of nothing behind it": sparse_gigabytes,
        "no tokens": text(b""),
    },
    ".offsets": {
        "offsets that go backwards": numbers("<i8", lambda values: values.put([0, -1], values[[-1, 0]])),
        "offsets below zero": numbers("<i8", lambda values: values.put(0, -5)),
        "offsets beyond the end": numbers("<i8", lambda values: values.put(-1, 10**15)),
        "the largest offset": numbers("<i8", lambda values: values.put(-1, 2**63 - 1)),
        "no offsets": text(b""),
        "half an offset": text(b"\0\0\0\0"),
        "a million offsets": text(bytes(8_000_000)),
        "64 GiB of nothing behind it": sparse_gigabytes,
    },
    "": {
        "not a number everywhere": numbers("<f2", lambda values: values.fill(np.nan)),
        "64 GiB of nothing behind it": sparse_gigabytes,
        "no keys": text(b""),
    },
    ".yaml": {
        "an object of Python": text("recipe: !!python/object/apply:os.system ['touch canary-was-imported']\n"),
        "names that multiply": text(
            "a: &a [x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi"))
        ),
        "a module to import": prefix(b"import: [canary_module]\n"),
        "a sign beyond Unicode": text('recipe: "\\UFFFFFFFF"\n'),
    },
}
TEXTS: dict[str, FileChange] = {
    "lists a hundred thousand deep": text("[" * 100_000 + "]" * 100_000),
    "objects a hundred thousand deep": text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "twenty million blanks": text(" " * 20_000_000 + "{}"),
    "a number of a million digits": text("1" * 1_000_000),
    "a byte order mark before it": prefix(b"\xef\xbb\xbf"),
    "UTF-16": in_utf16,
    "bytes that are no text": text(bytes(range(256))),
    "not a number": text("NaN"),
    "no field": text("{}"),
    "one text": text('"O"'),
    "64 GiB of nothing behind it": sparse_gigabytes,
}
LINKS: dict[str, FileChange] = {
    "a link to /dev/zero": link_to("/dev/zero"),
    "a link to itself": link_itself,
    "a link to nothing": link_to("../../../outside"),
    "a link to a file outside": link_to("/etc/hostname"),
}
