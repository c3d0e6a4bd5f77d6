"""Temporary folders that are removed at their end, and those of killed processes at the next start."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = ".manyformer-"
_SUFFIX = ".scratch"
_folders: set[Path] = set()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder in the system's folder for temporary files, removed when the block ends.

    Folders that killed processes have left are removed as well: each is locked by the process that uses it, and the
    lock belongs to the operating system.
    """
    # a kill leaves a folder without its lock
    for abandoned in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_SUFFIX}"):
        _remove_if_unlocked(abandoned)
    folder, handle = _make_locked_folder()
    _folders.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _folders.discard(folder)
        os.close(handle)


def remove_temporary_folders() -> None:
    """Remove the folders of this process, which is about to end without leaving its blocks."""
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)


def _make_locked_folder() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX))
        # another process that begins may take it for one that was left, and remove it before it is open or locked
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(handle, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder, handle
        os.close(handle)


def _remove_if_unlocked(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # removed in the meantime, or of another user
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(handle)
