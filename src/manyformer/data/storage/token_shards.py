"""Memory-mapped token shards: a file of token ids and a file of document offsets per split, written by streaming."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.files.atomic_files import atomic_write
from manyformer.base.files.json_records import Count, DamagedFile, Sha256
from manyformer.base.files.verified_folder import ContentCheck, VerifiedFolder
from manyformer.data.tokenizers.tokenizer import TokenIds
from manyformer.nn.batches import TextUnits

# Tokens that are checked at a time.
_BLOCK = 1 << 22

TokenDtype = Literal["uint8", "uint16", "uint32"]
TokenArray = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]


class ShardFacts(NamedTuple):
    """The facts of one shard: counts of tokens and of the text they encode, and a hash of its documents' tokens."""

    tokens: Count
    documents: Count
    characters: Count
    bytes: Count
    dtype: TokenDtype
    largest: Count
    """The largest token, 0 if there is none."""
    sha256: Sha256


class TokenShard(NamedTuple):
    """A memory-mapped split: document i is `tokens[offsets[i]:offsets[i + 1]]`."""

    tokens: TokenArray
    offsets: NDArray[np.int64]
    facts: ShardFacts

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each document."""
        return np.diff(self.offsets)


class ShardWriter:
    """Writes a shard from parts of documents, with at most one part in memory."""

    def __init__(self, tokens: BinaryIO, offsets: BinaryIO, vocab: int) -> None:
        self._tokens = tokens
        self._offsets = offsets
        # the smallest type that holds all ids: shards take most of the space of a run
        if vocab <= 1 << 8:
            self._name: TokenDtype = "uint8"
        elif vocab <= 1 << 16:
            self._name = "uint16"
        else:
            self._name = "uint32"
        self.dtype = np.dtype(self._name).newbyteorder("<")
        self._hash = hashlib.sha256()
        self._count = self._documents = self._characters = self._bytes = self._largest = 0

    def add(self, ids: TokenIds | Sequence[int], *, starts_document: bool, text: str = "") -> None:
        """Append tokens to the current document, or to a new one if `starts_document`; `text` is what they encode."""
        if starts_document:
            self._offsets.write(np.int64(self._count).astype("<i8").tobytes())
            self._documents += 1
        values = np.asarray(ids).astype(self.dtype)
        self._largest = max(self._largest, int(values.max(initial=0)))
        raw = values.tobytes()
        self._tokens.write(raw)
        # boundaries are hashed too: the same tokens in other documents are other data
        self._hash.update(b"document" if starts_document else b"")
        self._hash.update(raw)
        self._count += len(ids)
        self._characters += len(text)
        self._bytes += len(text) if text.isascii() else len(text.encode())

    def facts(self) -> ShardFacts:
        """The facts of what is in the shard so far."""
        counts = self._count, self._documents, self._characters, self._bytes
        return ShardFacts(*counts, self._name, self._largest, self._hash.hexdigest())

    def close(self) -> ShardFacts:
        """Write the last offset and return the facts of the shard."""
        self._offsets.write(np.int64(self._count).astype("<i8").tobytes())
        return self.facts()

    def sync(self) -> None:
        """Force what was written to disk."""
        for file in (self._tokens, self._offsets):
            file.flush()
            os.fsync(file.fileno())

    def resume(self, facts: ShardFacts) -> None:
        """Continue a shard whose `facts()` were these, in files that may hold more, which is removed.

        Raises DamagedFile if the files hold other tokens.
        """
        self._count, self._documents, self._characters, self._bytes, _, self._largest, _ = facts
        self._offsets.seek(0)
        starts = np.fromfile(self._offsets, "<i8", facts.documents)
        if len(starts) == facts.documents and facts.dtype == self._name:
            # the hash cannot be saved, so it is computed again, document by document as it was written
            self._tokens.seek(0)
            for length in np.diff(starts, append=facts.tokens).tolist():
                self._hash.update(b"document")
                self._hash_tokens(length)
        if self._hash.hexdigest() != facts.sha256:
            raise DamagedFile(f"{self._tokens.name} is damaged: it does not hold the tokens that were written to it")
        for file, size in ((self._tokens, facts.tokens * self.dtype.itemsize), (self._offsets, facts.documents * 8)):
            # what was written after the facts were saved is written again
            file.seek(size)
            file.truncate()

    def _hash_tokens(self, length: int) -> None:
        """Add the next `length` tokens of the file to the hash."""
        for start in range(0, length, _BLOCK):
            self._hash.update(self._tokens.read(min(_BLOCK, length - start) * self.dtype.itemsize))


class ShardWriters(NamedTuple):
    """The shards being written, and their facts, which are filled in when the context ends."""

    shards: dict[str, ShardWriter]
    facts: dict[str, ShardFacts]


@contextmanager
def write_shards(folder: Path, names: Sequence[str], vocab: int) -> Iterator[ShardWriters]:
    """Open shards with these names in `folder` for writing; their files appear only if the context succeeds."""
    with ExitStack() as stack:
        writers = ShardWriters({}, {})
        for name in names:
            # both files appear together when the context succeeds, or neither
            tokens, offsets = (stack.enter_context(atomic_write(path)) for path in shard_paths(folder, name))
            writers.shards[name] = ShardWriter(tokens, offsets, vocab)
        yield writers
        writers.facts.update({name: writer.close() for name, writer in writers.shards.items()})


def is_complete(folder: Path, name: str, facts: ShardFacts) -> bool:
    """Whether the files of a shard exist with the sizes that follow from `facts`."""
    return all(path.is_file() and path.stat().st_size == size for path, size in _sizes(folder, name, facts).items())


def open_shard(folder: Path, name: str, facts: ShardFacts) -> TokenShard:
    """Memory-map a shard that this process has written."""
    tokens, offsets = shard_paths(folder, name)
    return TokenShard(_memory_map(tokens, facts.dtype), _memory_map(offsets, "int64"), facts)


def open_verified_shard(files: VerifiedFolder, name: str, facts: ShardFacts) -> TokenShard:
    """Memory-map a shard of a folder with a manifest.

    Tokens and offsets are compared with the facts when the sums of their files are compared. Raises DamagedFile.
    """
    sizes = _sizes(files.folder, name, facts)
    for path, size in sizes.items():
        if path.name in files and files.sums[path.name].size != size:
            counts = f"{facts.tokens:,} tokens in {facts.documents:,} documents"
            raise DamagedFile(
                f"{path} is damaged: {counts} take {size:,} bytes, and it has {files.sums[path.name].size:,}"
            )
    tokens, offsets = sizes

    def check_tokens(path: Path) -> None:
        if max((int(block.max()) for block in _read_blocks(path, facts.dtype)), default=0) != facts.largest:
            raise DamagedFile(f"{path} is damaged: its largest token is not {facts.largest:,}")

    def check_offsets(path: Path) -> None:
        values = _memory_map(path, "int64")
        if values[0] != 0 or values[-1] != facts.tokens or (np.diff(values) < 0).any():
            raise DamagedFile(f"{path} is damaged: offsets of documents must ascend from 0 to {facts.tokens:,}")

    files.file(tokens.name, ContentCheck(f"{facts.dtype} up to {facts.largest}", check_tokens))
    files.file(offsets.name, ContentCheck(f"offsets up to {facts.tokens}", check_offsets))
    return open_shard(files.folder, name, facts)


def shard_units(shard: TokenShard) -> TextUnits:
    """The units that scores are relative to; every token except the first of each document is a target."""
    return TextUnits(shard.facts.tokens - shard.facts.documents, shard.facts.characters, shard.facts.bytes)


def _read_blocks(path: Path, dtype: str) -> Iterator[NDArray[Any]]:
    """The values of a file in blocks. They are read, because the pages of a map count as memory of the process."""
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype, _BLOCK)):
            yield block


def _memory_map(path: Path, dtype: str) -> NDArray[Any]:
    # an empty file cannot be mapped
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    # slices of a memory map take ten times longer than those of its plain view
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _sizes(folder: Path, name: str, facts: ShardFacts) -> dict[Path, int]:
    """The files of a shard, tokens first, and the sizes that follow from its facts."""
    tokens, offsets = shard_paths(folder, name)
    return {tokens: facts.tokens * np.dtype(facts.dtype).itemsize, offsets: (facts.documents + 1) * 8}


def shard_paths(folder: Path, name: str) -> tuple[Path, Path]:
    """The files of the tokens and of the offsets of a shard."""
    return folder / f"{name}.tokens", folder / f"{name}.offsets"
