"""Crash-safe writing: a draft in the same folder, forced to disk (fsync) and renamed; a full disk is reported."""

import errno
import glob
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from manyformer.errors import UserError

_DISK_FULL_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be too large",
}


class DiskFull(UserError):
    """The disk was full; existing files are not changed. `reason` is why nothing could be written."""

    def __init__(self, message: str, reason: str = "the disk is full") -> None:
        super().__init__(message)
        self.reason = reason


@contextmanager
def report_disk_full(subject: object) -> Iterator[None]:
    """Convert errors of a full disk in the block into DiskFull; `subject` names what could not be written.

    The subject of an outer block takes the place of that of an inner one.
    """
    try:
        yield
    except DiskFull as error:
        raise DiskFull(f"{error.reason}: {subject} could not be written", error.reason) from error
    except (OSError, SafetensorError) as error:
        match = re.search(r"os error (\d+)", str(error))
        number = error.errno if isinstance(error, OSError) else int(match.group(1)) if match else None
        if number in _DISK_FULL_ERRORS:
            reason = _DISK_FULL_ERRORS[number]
            raise DiskFull(f"{reason}: {subject} could not be written", reason) from error
        raise


def draft_path(path: Path) -> Path:
    """Where this process writes what becomes `path` when it is complete; drafts of ended processes are removed."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        number = draft.name.split(".")[-2]
        if number.isdecimal() and not _is_running(int(number)):
            remove_draft(draft)
    # The process number lets several processes prepare the same data at once: the last rename wins, with equal content.
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # of another user
        return True
    return True


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that is renamed to `path` when the block succeeds and deleted when it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_path(path)
    try:
        with report_disk_full(path), draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it holds either the old or the new content."""
    with atomic_write(path) as file:
        file.write(content)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text file (UTF-8) atomically."""
    atomic_write_bytes(path, text.encode())


def sync_folder(folder: Path) -> None:
    """Force the directory entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_drafts(folder: Path) -> None:
    """Remove the unfinished drafts of a killed process."""
    for draft in folder.glob(".*.part"):
        remove_draft(draft)


def remove_draft(draft: Path) -> None:
    """Remove a file or a folder with all that it holds."""
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)
