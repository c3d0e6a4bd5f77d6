"""An index over the keys of a large datastore, by faiss: all keys, or codes of keys in lists."""

import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.datastore.exact_search import ExcludedRange, KeyArray
from manyformer.errors import UserError
from manyformer.train.durable_files import replace_text, room_for

BLOCK = 1 << 16
"""Keys that are added at a time."""

PROBE = 32
"""Lists that are looked through unless told otherwise, as in Khandelwal et al. 2020, section 3."""


class IndexKind(ABC):
    """A way to find near keys."""

    @abstractmethod
    def empty(self, faiss: Any, width: int) -> Any:
        """An index without keys."""

    @abstractmethod
    def learns_from(self, entries: int) -> int:
        """From how many keys it learns before any is added."""


@final
@dataclass(frozen=True)
class FlatIndex(IndexKind):
    """All keys as they are, in single precision and in memory: exact."""

    def empty(self, faiss: Any, width: int) -> Any:
        return faiss.IndexFlatL2(width)

    def learns_from(self, entries: int) -> int:
        return 0


@final
@dataclass(frozen=True)
class IVFPQIndex(IndexKind):
    """Keys in `lists` by their nearest centroid, each as `codes` bytes (Jegou et al. 2011): IVF-PQ.

    The paper has 4096 lists and 64 bytes, learned from a million keys, for 103 million entries. Unless given, lists are
    as many as a 64th of the keys it learns from, and codes a byte for four channels, both at most the paper's.
    """

    lists: int | None = None
    codes: int | None = None
    learn: int = 1_000_000

    def empty(self, faiss: Any, width: int) -> Any:
        codes = self.codes or next(c for c in range(min(64, -(-width // 4)), 0, -1) if width % c == 0)
        if width % codes:
            raise UserError(f"codes ({codes}) must divide the width of the keys ({width})")
        assert self.lists is not None
        return faiss.IndexIVFPQ(faiss.IndexFlatL2(width), width, self.lists, codes, 8)

    def learns_from(self, entries: int) -> int:
        return min(self.learn, entries)


LEAST = 39 * 256
"""Keys that faiss wants to see before it makes codes of 256 values."""


class KeyIndex:
    """An index in a file, mapped where it can be; `probe` is how many lists are looked through."""

    def __init__(self, file: Path, probe: int | None) -> None:
        faiss = faiss_module()
        # faiss would read on where a mapped file has ended, and take the process with it
        if not file.exists() or file.stat().st_size != _size(file):
            raise UserError(f"{file} is missing or cut; make the index anew")
        self._faiss = faiss.read_index(str(file), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        self.kind = type(self._faiss).__name__
        if hasattr(self._faiss, "nprobe"):
            self._faiss.nprobe = min(PROBE if probe is None else probe, self._faiss.nlist)
        elif probe is not None:
            raise UserError(f"probe ({probe}) is for an index with lists, and {file} looks through all keys")

    def search(self, queries: Float[Tensor, "n d"], k: int, *, ban: ExcludedRange | None = None) -> Int[Tensor, "n k"]:
        """The `k` entries that it takes for the nearest ones; -1 where it finds fewer."""
        asked = np.ascontiguousarray(queries.float().cpu().numpy())
        fetch, total = k, int(self._faiss.ntotal)
        while True:
            entries = torch.from_numpy(self._faiss.search(asked, fetch)[1]).to(queries.device)
            if ban is None:
                return entries
            good = (entries >= 0) & ((entries < ban.begin[:, None]) | (entries >= ban.end[:, None]))
            if fetch >= total or bool((good.sum(1) >= k).all()):
                # what counts first, in the order in which it was found
                order = good.byte().argsort(dim=1, descending=True, stable=True)[:, :k]
                return torch.where(good, entries, -1).gather(1, order)
            fetch = min(2 * fetch, total)


def open_index(file: Path, probe: int | None) -> KeyIndex | None:
    """The index in this file; None where there is none."""
    return KeyIndex(file, probe) if _note(file).exists() else None


def remove_index(file: Path) -> None:
    """Remove an index, if there is one."""
    for part in (_note(file), file):
        part.unlink(missing_ok=True)


def _note(file: Path) -> Path:
    """Where the size of an index stands; it is written last."""
    return file.with_suffix(".json")


def _size(file: Path) -> int | None:
    try:
        return int(json.loads(_note(file).read_text(encoding="utf-8"))["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_index(keys: KeyArray, file: Path, kind: IndexKind, *, each: Callable[[int], None] = lambda done: None) -> None:
    """Write an index over `keys`, whole or not at all; `each` is told how many are in it. Raises UserError."""
    faiss = faiss_module()
    if isinstance(kind, IVFPQIndex):
        if len(keys) < LEAST:
            raise UserError(f"codes of keys are learned from {LEAST:,} or more, and there are {len(keys):,}; use flat")
        lists = kind.lists or max(1, min(4096, kind.learns_from(len(keys)) // 64))
        kind = IVFPQIndex(lists, kind.codes, kind.learn)
        if not 1 <= lists <= kind.learns_from(len(keys)):
            raise UserError(
                f"lists ({lists}) must be from 1 to {kind.learns_from(len(keys)):,}, the keys to learn from"
            )
    index = kind.empty(faiss, keys.shape[1])
    if taken := kind.learns_from(len(keys)):
        # spread over the text, and always the same
        index.train(_single(keys[np.linspace(0, len(keys) - 1, taken).astype(np.int64)]))
    for begin in range(0, len(keys), BLOCK):
        index.add(_single(keys[begin : begin + BLOCK]))
        each(min(begin + BLOCK, len(keys)))
    draft = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with room_for(f"the index {file}"):
            faiss.write_index(index, str(draft))
            remove_index(file)
            draft.replace(file)
            replace_text(_note(file), json.dumps({"keys": len(keys), "bytes": file.stat().st_size}) + "\n")
    finally:
        draft.unlink(missing_ok=True)


def _single(keys: KeyArray) -> Any:
    return np.ascontiguousarray(keys, dtype=np.float32)


def faiss_module() -> Any:
    """The package. Raises UserError with what to install where it is missing."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise UserError("an index needs faiss: pip install 'manyformer[knn]'") from error
