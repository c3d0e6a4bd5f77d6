"""Atomic file writes: a temporary file in the same folder that is renamed when it is complete."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from manyformer.errors import UserError


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that is renamed to `path` when the block succeeds and deleted when it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process number lets several processes prepare the same data at once: the last rename wins, with equal content.
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(f"{path}: the disk is full; free some space and start again") from error
        raise
    finally:
        draft.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text file (UTF-8) atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())
