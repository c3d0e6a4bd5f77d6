"""Search of the nearest keys by squared distance: exact, in blocks, or by a faiss index for a large datastore.

An index is exact, too, or approximate with quantized keys in lists; distances are computed from the keys either way."""

import errno
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_path, report_disk_full
from manyformer.base.files.json_records import AS_OBJECT, DamagedFile, FileRecord, PositiveCount
from manyformer.base.files.verified_folder import FileSum, VerifiedFolder, file_sum
from manyformer.nn.ops.top_products import top_products as largest

KeyArray = NDArray[np.float16] | NDArray[np.float32]
"""Keys (n, width) in memory or mapped from a file."""

KEYS_PER_BLOCK = 1 << 15
"""The number of keys per block of the search."""

VALUES_PER_BLOCK = 1 << 22
"""The number of key values per block when distances are computed."""

KEYS_PER_ADDITION = 1 << 16
"""The number of keys that are added to an index at a time."""

MIN_TRAINING_KEYS = 39 * 256
"""The number of keys that faiss recommends for training codes of 256 values."""

DEFAULT_PROBE = 32
"""The default number of lists that a search visits, as in Khandelwal et al. 2020, section 3."""


class Neighbours(NamedTuple):
    """The nearest entries of each query in ascending distance; missing ones are entry -1 at an infinite distance."""

    distances: Float[Tensor, "n k"]
    entries: Int[Tensor, "n k"]


class ExcludedRanges(NamedTuple):
    """For each query r half-open ranges of entries, `starts` to `stops`, that are excluded from its neighbours."""

    starts: Int[Tensor, "n r"]
    stops: Int[Tensor, "n r"]

    def contain(self, entries: Int[Tensor, "#n m"]) -> Bool[Tensor, "n m"]:
        """Which entries are excluded for each query."""
        excluded = torch.zeros(len(self.starts), entries.shape[1], dtype=torch.bool, device=entries.device)
        for start, stop in zip(*(bounds.to(entries.device).T[..., None] for bounds in self)):
            excluded |= (entries >= start) & (entries < stop)
        return excluded


def nearest_entries(
    keys: KeyArray, queries: Float[Tensor, "n d"], k: int, *, excluded: ExcludedRanges | None = None
) -> Int[Tensor, "n k"]:
    """The `k` entries of `keys` at the least squared distance from each query; -1 if there are fewer.

    Ties are broken arbitrarily. |q - k|^2 is minimal where q.k - |k|^2 / 2 is maximal, which is a dot product of
    vectors with one more channel.
    """
    augmented_queries = torch.cat([queries, torch.ones_like(queries[:, :1])], 1)[None]
    best_products = queries.new_full((len(queries), 0), -torch.inf)
    entries = torch.full_like(best_products, -1, dtype=torch.long)
    for start in range(0, len(keys), KEYS_PER_BLOCK):
        block = _to_tensor(keys[start : start + KEYS_PER_BLOCK], queries)
        augmented_keys = torch.cat([block, (block * block).sum(1, keepdim=True) / -2], 1)
        mask = None
        if excluded is not None:
            mask = excluded.contain(torch.arange(start, start + len(block), device=queries.device)[None])
        (products,), (index,) = largest(augmented_queries, augmented_keys[None], k, mask)
        candidates = torch.cat([best_products, products], 1)
        best_products, order = candidates.topk(min(k, candidates.shape[1]))
        entries = torch.cat([entries, index + start], 1).gather(1, order)
    entries = torch.where(best_products > -torch.inf, entries, -1)
    return F.pad(entries, (0, k - entries.shape[1]), value=-1)


def with_distances(keys: KeyArray, queries: Float[Tensor, "n d"], entries: Int[Tensor, "n k"]) -> Neighbours:
    """The entries with their exact squared distances, sorted by distance and then by entry.

    Distances are recomputed from the keys because a search may have rounded them or compared quantized keys.
    """
    count, k = entries.shape
    distances = queries.new_empty(count, k)
    rows = max(1, VALUES_PER_BLOCK // (k * queries.shape[1]))
    for start in range(0, count, rows):
        query_block = queries[start : start + rows]
        entry_block = entries[start : start + rows]
        key_block = _to_tensor(keys[entry_block.clamp(min=0).cpu().numpy()], queries)
        distances[start : start + rows] = (query_block[:, None] - key_block).square().sum(-1)
    distances = distances.masked_fill(entries < 0, torch.inf)
    # sorted by entry first, so that the order of equal distances is determined
    entries, order = entries.sort(dim=1)
    distances, stable_order = distances.gather(1, order).sort(stable=True, dim=1)
    return Neighbours(distances, entries.gather(1, stable_order))


def _to_tensor(keys: KeyArray, like: Tensor) -> Tensor:
    """A copy of some keys on the device and in the dtype of `like`."""
    return torch.from_numpy(np.array(keys)).to(like.device).to(like.dtype)


@final
@dataclass(frozen=True)
class FlatIndex:
    """All keys in single precision and in memory: exact."""

    def make_empty(self, faiss: Any, keys: KeyArray) -> Any:
        """A new index for `keys`, which contains none of them yet."""
        return faiss.IndexFlatL2(keys.shape[1])


@final
@dataclass(frozen=True)
class IVFPQIndex:
    """IVF-PQ: keys in `lists` by their nearest centroid, each quantized to `codes` bytes (Jegou et al. 2011).

    The kNN-LM paper has 4096 lists and 64 bytes, trained on a million keys, for 103 million entries. By default there
    is one list per 64 training keys, and one byte per four channels, both at most the paper's.
    """

    lists: int | None = None
    codes: int | None = None
    train_keys: int = 1_000_000

    def make_empty(self, faiss: Any, keys: KeyArray) -> Any:
        """A new index, trained on `keys` but empty. Raises UserError for settings that do not fit the keys."""
        num_training = min(self.train_keys, len(keys))
        width = keys.shape[1]
        if len(keys) < MIN_TRAINING_KEYS:
            raise UserError(
                f"quantization is trained on {MIN_TRAINING_KEYS:,} keys or more, and there are {len(keys):,}; use flat"
            )
        lists = self.lists or max(1, min(4096, num_training // 64))
        if not 1 <= lists <= num_training:
            raise UserError(f"lists ({lists}) must be from 1 to {num_training:,}, the number of training keys")
        # the largest divisor of the width up to a quarter of it: each code quantizes equally many channels
        codes = self.codes or next(c for c in range(min(64, -(-width // 4)), 0, -1) if width % c == 0)
        if width % codes:
            raise UserError(f"codes ({codes}) must divide the width of the keys ({width})")
        index = faiss.IndexIVFPQ(faiss.IndexFlatL2(width), width, lists, codes, 8)
        # evenly spaced over the text, and always the same
        index.train(_as_float32(keys[np.linspace(0, len(keys) - 1, num_training).astype(np.int64)]))
        return index


class IndexRecord(FileRecord):
    """The size and sum of an index file, and how many keys of how many numbers it is over; it is written last."""

    title: ClassVar[str] = "the description of an index"
    format_number: ClassVar[int] = 2

    keys: PositiveCount
    width: PositiveCount
    file: Annotated[FileSum, AS_OBJECT]


class KeyIndex:
    """An index in a file, memory-mapped where possible; `probe` is the number of lists that a search visits."""

    def __init__(self, file: Path, probe: int | None) -> None:
        faiss = faiss_module()
        record = IndexRecord.read(_record_file(file))
        # faiss would read beyond the end of a truncated mapped file and crash the process
        path = VerifiedFolder(file.parent, {file.name: record.file}).file(file.name)
        try:
            self._faiss = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        except RuntimeError as error:
            raise DamagedFile(f"{file} is damaged: it is no index of faiss") from error
        self.shape = record.keys, record.width
        if (self._faiss.ntotal, self._faiss.d) != self.shape:
            raise DamagedFile(f"{file} is damaged: it is not over {record.keys:,} keys of {record.width:,} numbers")
        self.kind = type(self._faiss).__name__
        if hasattr(self._faiss, "nprobe"):
            self._faiss.nprobe = min(DEFAULT_PROBE if probe is None else probe, self._faiss.nlist)
        elif probe is not None:
            raise UserError(f"probe ({probe}) is for an index with lists, and {file} searches all keys")

    def search(
        self, queries: Float[Tensor, "n d"], k: int, *, excluded: ExcludedRanges | None = None
    ) -> Int[Tensor, "n k"]:
        """The `k` nearest entries of each query according to the index; -1 if it finds fewer."""
        query_array = np.ascontiguousarray(queries.float().cpu().numpy())
        # more and more, because an index knows nothing of exclusions: it may find nothing but excluded entries
        fetch = k
        total = int(self._faiss.ntotal)
        while True:
            entries = torch.from_numpy(self._faiss.search(query_array, fetch)[1]).to(queries.device)
            if excluded is None:
                return entries
            allowed = (entries >= 0) & ~excluded.contain(entries)
            if fetch >= total or bool((allowed.sum(1) >= k).all()):
                # allowed entries first, in the order of the search
                order = allowed.byte().argsort(dim=1, descending=True, stable=True)[:, :k]
                return torch.where(allowed, entries, -1).gather(1, order)
            fetch = min(2 * fetch, total)


def open_index(file: Path, shape: tuple[int, int], probe: int | None) -> KeyIndex | None:
    """The index in this file over keys of this shape; None where there is none."""
    # without its record an index is unfinished, or of another one
    if not _record_file(file).exists():
        return None
    index = KeyIndex(file, probe)
    if index.shape != shape:
        raise DamagedFile(
            f"{file} is over {index.shape[0]:,} keys of {index.shape[1]:,} numbers, and the datastore has {shape[0]:,} "
            f"of {shape[1]:,}; make the index anew"
        )
    return index


def remove_index(file: Path) -> None:
    """Remove an index, if there is one."""
    for path in (_record_file(file), file):
        path.unlink(missing_ok=True)


def _record_file(file: Path) -> Path:
    return file.with_suffix(".json")


def make_index(
    keys: KeyArray, file: Path, kind: FlatIndex | IVFPQIndex, *, on_progress: Callable[[int], None] = lambda done: None
) -> None:
    """Write an index over `keys` atomically; `on_progress` is called with the number of keys added.

    Raises UserError for too few keys, for lists and codes that do not fit them, and for a full disk.
    """
    faiss = faiss_module()
    index = kind.make_empty(faiss, keys)
    for start in range(0, len(keys), KEYS_PER_ADDITION):
        # in blocks, because the keys may be larger than memory
        index.add(_as_float32(keys[start : start + KEYS_PER_ADDITION]))
        on_progress(min(start + KEYS_PER_ADDITION, len(keys)))
    with report_disk_full(f"the index {file}"):
        with atomic_path(file) as draft:
            try:
                faiss.write_index(index, str(draft))
            except RuntimeError as error:
                raise _as_system_error(error) from error
            # an index and its record belong together: the old record goes before the new index comes
            remove_index(file)
        IndexRecord(keys=len(keys), width=keys.shape[1], file=file_sum(file)).write(_record_file(file))


def _as_system_error(error: RuntimeError) -> Exception:
    """The error of the system that faiss tells as text, or the error as it is."""
    numbers = (number for number in errno.errorcode if os.strerror(number) in str(error))
    number = next(numbers, None)
    if number is None:
        return error
    return OSError(number, os.strerror(number))


def _as_float32(keys: KeyArray) -> Any:
    return np.ascontiguousarray(keys, dtype=np.float32)


def faiss_module() -> Any:
    """The faiss package. Raises UserError with the package to install if it is missing."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise UserError("an index needs faiss: pip install 'manyformer[knn]'") from error
