"""Crash-safe writing of files and folders: write a draft, force it to disk (fsync), rename it; report a full disk."""

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
_DISK_FULL_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be too large",
}


class DiskFull(UserError):
    """The disk was full; existing files are not changed."""


@contextmanager
def report_disk_full(subject: str) -> Iterator[None]:
    """Convert errors of a full disk in the block into DiskFull; `subject` names what could not be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        match = re.search(r"os error (\d+)", str(error))
        number = error.errno if isinstance(error, OSError) else int(match.group(1)) if match else None
        if number in _DISK_FULL_ERRORS:
            raise DiskFull(f"{_DISK_FULL_ERRORS[number]}: {subject} could not be written") from error
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    replace_text(path, json.dumps(value) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically: after a crash it holds either the old or the new text."""
    draft = path.with_name(f".{path.name}.part")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def sync_folder(folder: Path) -> None:
    """Force the directory entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path) -> None:
    """Write a manifest with the size and SHA-256 of every file, and force all files to disk."""
    entries = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        entries[str(file.relative_to(folder))] = {"size": file.stat().st_size, "sha256": digest}
    write_json(folder / MANIFEST, entries)
    sync_folder(folder)


def find_damage(folder: Path) -> str | None:
    """Compare a folder with its manifest: the first file that differs and how, None if the folder is intact."""
    manifest = folder / MANIFEST
    try:
        entries = json.loads(manifest.read_text(encoding="utf-8"))
        expected = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in entries.items()}
    except FileNotFoundError:
        return f"{manifest.name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest.name} is not the list of files that it should be"
    for name, (size, digest) in expected.items():
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
    """Remove the unfinished drafts of a killed process."""
    for draft in folder.glob(".*.part"):
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)
