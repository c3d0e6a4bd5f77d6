"""Writing that survives a kill and tells a full disk apart: folders beside their place, forced to the disk, renamed."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from manyformer.errors import UserError

MANIFEST = "manifest.json"
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be too large",
}


class DiskFull(UserError):
    """There was no room to write; what was there before is untouched."""


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Turns the system's complaint about a full disk into DiskFull, whoever raised it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _number(str(error))
        if number in _FULL:
            raise DiskFull(f"{_FULL[number]}: {what} could not be written") from error
        raise


def _number(message: str) -> int | None:
    found = re.search(r"os error (\d+)", message)
    return int(found.group(1)) if found else None


def write_json(path: Path, value: Any) -> None:
    """A JSON file, forced to the disk; `path` must be new or inside a folder that is."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """A text file that is either the old or the new one, whole."""
    draft = path.with_name(f".{path.name}.part")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path) -> None:
    """Add a manifest of the size and SHA-256 of every file, and force all to the disk."""
    entries = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        entries[str(file.relative_to(folder))] = {"size": file.stat().st_size, "sha256": digest}
    write_json(folder / MANIFEST, entries)
    sync_folder(folder)


def find_damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, by the name of the file; None where every file is as it was written."""
    manifest = folder / MANIFEST
    try:
        entries = json.loads(manifest.read_text(encoding="utf-8"))
        wanted = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in entries.items()}
    except FileNotFoundError:
        return f"{manifest.name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest.name} is not the list of files that it should be"
    for name, (size, digest) in wanted.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
        with file.open("rb") as handle:
            if hashlib.file_digest(handle, "sha256").hexdigest() != digest:
                return f"{name} is not as it was written (its SHA-256 differs)"
    return None


def remove_drafts(folder: Path) -> None:
    """Remove what a killed process left half written."""
    for draft in folder.glob(".*.part"):
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)
