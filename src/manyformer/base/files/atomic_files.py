"""The one way in which files are written: a draft in the same folder, forced to disk (fsync) and renamed.

Whatever prevents it is told with the name of the file. The rights are those that the user's mask leaves.
"""

import errno
import glob
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from manyformer.base.errors import UserError

_DISK_FULL_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be too large",
}

_OTHER_ERRORS = {
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "permission is denied",
    errno.EPERM: "permission is denied",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EISDIR: "there is a folder of that name",
    errno.ENOTEMPTY: "there is a folder of that name",
    errno.EEXIST: "there is a file of that name",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.ENOENT: "a folder of the path is missing",
    errno.ELOOP: "the links of the path lead in a circle",
    errno.EXDEV: "it lies on another disk",
    errno.EINVAL: "the name is not allowed on this disk",
    errno.EIO: "the disk fails",
    errno.EMFILE: "too many files are open",
    errno.ENFILE: "too many files are open",
}
"""Why a file cannot be written besides a full disk. Some of these errors are also those of files that are read."""


class NotWritable(UserError):
    """A file could not be written; existing files are not changed. `reason` is why."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class DiskFull(NotWritable):
    """The disk was full."""

    def __init__(self, message: str, reason: str = "the disk is full") -> None:
        super().__init__(message, reason)


@contextmanager
def report_disk_full(subject: object) -> Iterator[None]:
    """Convert errors of a full disk in the block into DiskFull; `subject` names what could not be written.

    The subject of an outer block takes the place of that of an inner one.
    """
    try:
        yield
    except NotWritable as error:
        # a disk that is full, or any other reason of a writer below
        raise type(error)(f"{error.reason}: {subject} could not be written", error.reason) from error
    except (OSError, SafetensorError) as error:
        if (reason := _DISK_FULL_ERRORS.get(_error_number(error))) is not None:
            raise DiskFull(f"{reason}: {subject} could not be written", reason) from error
        raise


@contextmanager
def report_not_written(subject: object) -> Iterator[None]:
    """`report_disk_full`, which also converts all other errors of writing into NotWritable.

    For blocks that read no other files, whose errors would name the wrong one.
    """
    with report_disk_full(subject):
        try:
            yield
        except (OSError, SafetensorError) as error:
            number = _error_number(error)
            # a full disk has its own sentence; a reader that has gone is no fault of the file
            if number in _DISK_FULL_ERRORS or isinstance(error, BrokenPipeError):
                raise
            # what is wrong with the tensors themselves is a defect, not a full disk
            if isinstance(error, SafetensorError) and not number:
                raise
            reason = _OTHER_ERRORS.get(number) or getattr(error, "strerror", None) or str(error)
            raise NotWritable(f"{reason}: {subject} could not be written", reason) from error


def _error_number(error: OSError | SafetensorError) -> int:
    """The number of the system's error; 0 for an error without one."""
    if isinstance(error, OSError):
        return error.errno or 0
    # safetensors tells errors of its files as text
    match = re.search(r"os error (\d+)", str(error))
    if match:
        return int(match.group(1))
    return 0


def make_folder(folder: Path) -> Path:
    """Make a folder and those that it lies in, where they are missing, and return it. Raises NotWritable."""
    with report_not_written(f"the folder {folder}"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            # a link may lead in a circle, or to nothing
            folder.stat()
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
    return folder


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
    """Open a binary file that is renamed to `path` when the block succeeds and deleted when it raises.

    Raises NotWritable.
    """
    with _draft(path) as draft:
        with report_not_written(path):
            file = draft.open("wb")
        with report_disk_full(path), file:
            yield file
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """`atomic_write` for libraries that open their file by name, which may give it other rights than the user's."""
    with _draft(path) as draft:
        with report_not_written(path):
            # an ordinary file has the rights that the user's mask leaves
            draft.touch()
            rights = stat.S_IMODE(draft.stat().st_mode)
        with report_not_written(path):
            yield draft
            draft.chmod(rights)
            with draft.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """The draft of a file, which is renamed to `path` when the block succeeds and deleted when it raises."""
    # the draft lies in the same folder, because a rename cannot cross disks
    make_folder(path.parent)
    with report_not_written(path):
        if path.exists() and not path.is_file():
            # a rename would put a file in the place of a device
            reason = "there is a device or pipe of that name"
            if path.is_dir():
                reason = _OTHER_ERRORS[errno.EISDIR]
            raise NotWritable(f"{reason}: {path} could not be written", reason)
        draft = draft_path(path)
    try:
        yield draft
        with report_not_written(path):
            draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it holds either the old or the new content."""
    with atomic_write(path) as file:
        file.write(content)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text file (UTF-8) atomically."""
    atomic_write_bytes(path, text.encode())


def atomic_copy(source: Path, path: Path) -> None:
    """Copy the content of a file atomically."""
    with source.open("rb") as original, atomic_write(path) as file:
        shutil.copyfileobj(original, file)


def append_bytes(path: Path, content: bytes, *, drop: int = 0) -> None:
    """Append to a file in one call, after its last `drop` bytes are removed. Raises NotWritable.

    What a full disk leaves of the content is removed again.
    """
    # without a buffer, which would be written once more when the file is closed
    with report_not_written(path), path.open("ab", buffering=0) as file:
        length = file.seek(0, os.SEEK_END) - drop
        try:
            if drop:
                file.truncate(length)
            rest = memoryview(content)
            while rest:
                # the system may write a part
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(length)
            raise


def reserve_file(path: Path, size: int) -> None:
    """Make a file of this size with room on the disk, to be written in place through a map. Raises NotWritable.

    A map of a file without room would end the process by a signal where the disk is full.
    """
    with report_not_written(path), path.open("wb") as file:
        # not every system can reserve disk space, but all can set the size
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)


def open_in_place(path: Path, *, empty: bool = False) -> BinaryIO:
    """A file to be changed where it is, `empty` or as it was left: for work that an interruption does not undo."""
    with report_not_written(path):
        return path.open("w+b" if empty else "r+b")


def sync_folder(folder: Path) -> None:
    """Force the directory entries of a folder to disk."""
    # a rename is safe on disk only with its folder
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
