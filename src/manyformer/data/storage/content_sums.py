"""Sampled sums of files: a change of content that leaves size and modification time as they were.

A stamp of a file has its sum as a text that begins with `SUM_MARK`, after the path, the size and the time. Sums are
kept apart from the rest of a stamp: files that versions without sums prepared have stamps that are equal but for them.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from manyformer.base.errors import UserError

SUM_MARK = "sampled-sum:"
WHOLE_BYTES = 1 << 16
"""The size up to which a file is read as a whole."""
_END_BYTES = 1 << 14
_BLOCK_BYTES = 1 << 12
_BLOCKS = 8
MAX_FILES = 256
"""The files of a folder that are summed: all, or as many evenly among them."""

ItemT = TypeVar("ItemT")


def content_sum(path: Path) -> str:
    """A hash of a file: of all of it if it is small, else of both ends and of blocks between them.

    At most `WHOLE_BYTES` are read. The blocks are drawn evenly over the file by a generator seeded with its size, so
    that they are always the same."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            for start, count in _sampled_ranges(path.stat().st_size):
                file.seek(start)
                # at most 64 KiB are read of any file, so that sums cost little next to the data
                digest.update(file.read(count))
    except OSError as error:
        raise UserError(f"{path}: this file cannot be read ({error.strerror})") from None
    return f"{SUM_MARK}{digest.hexdigest()}"


def folder_sum(files: Sequence[Path]) -> str:
    """A hash of the sums of files, of at most `MAX_FILES` among them."""
    digest = hashlib.blake2b(digest_size=16)
    for file in evenly_chosen(files, MAX_FILES):
        digest.update(content_sum(file).encode())
    return f"{SUM_MARK}{digest.hexdigest()}"


def evenly_chosen(items: Sequence[ItemT], maximum: int) -> list[ItemT]:
    """All items, or `maximum` of them at even distances."""
    count = min(len(items), maximum)
    return [items[index * len(items) // count] for index in range(count)]


def without_sums(stamps: Any) -> Any:
    """JSON values without the sums in their lists."""
    if isinstance(stamps, dict):
        return {key: without_sums(value) for key, value in stamps.items()}
    if isinstance(stamps, list | tuple):
        return [without_sums(value) for value in stamps if not _is_sum(value)]
    return stamps


def changed_contents(recorded: Any, current: Any) -> list[str]:
    """The paths whose sums differ in two stamps that are equal but for sums; those that have none are not compared."""
    recorded_sums = dict(_sums_by_place(recorded))
    return [
        path
        for place, (path, current_sum) in _sums_by_place(current)
        # a recorded stamp without a sum is that of an earlier version, and counts as equal
        if recorded_sums.get(place, (path, current_sum))[1] != current_sum
    ]


def _sampled_ranges(size: int) -> Iterator[tuple[int, int]]:
    """The starts and lengths of what is hashed of a file of this size."""
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    yield 0, _END_BYTES
    # the size is all that is known of a file before it is read, and is the same at the next opening
    draw = random.Random(size)
    # one block in each of equal parts, so that no large part of the file is missed
    stride = (size - 2 * _END_BYTES) // _BLOCKS
    for block in range(_BLOCKS):
        yield _END_BYTES + block * stride + draw.randrange(max(1, stride - _BLOCK_BYTES + 1)), _BLOCK_BYTES
    yield size - _END_BYTES, _END_BYTES


def _is_sum(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(SUM_MARK)


def _sums_by_place(stamps: Any, place: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Every sum with its place among the stamps, counted without sums, and the path before it."""
    if isinstance(stamps, dict):
        for key, value in stamps.items():
            yield from _sums_by_place(value, f"{place}/{key}")
    elif isinstance(stamps, list | tuple):
        path = ""
        number = 0
        for value in stamps:
            if _is_sum(value):
                yield f"{place}/{number}", (path, value)
                continue
            # sums are not counted, so that places agree with those in stamps without sums
            number += 1
            if isinstance(value, str) and value.startswith("/"):
                path = value
            yield from _sums_by_place(value, f"{place}/{number}")
