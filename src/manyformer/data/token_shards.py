"""Memory-mapped token shards: a file of token ids and a file of document offsets per split, written by streaming."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.batches import TextUnits
from manyformer.data.atomic_files import atomic_write
from manyformer.data.tokenizer import TokenIds

TokenArray = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]


class ShardFacts(NamedTuple):
    """The manifest entry of one shard: counts of tokens and of the text they encode, and a hash of the tokens."""

    tokens: int
    documents: int
    characters: int
    bytes: int
    dtype: str
    sha256: str


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
        self._tokens, self._offsets = tokens, offsets
        self.dtype = np.dtype("u1" if vocab <= 1 << 8 else "<u2" if vocab <= 1 << 16 else "<u4")
        self._hash = hashlib.sha256()
        self._count = self._documents = self._characters = self._bytes = 0

    def add(self, ids: TokenIds | Sequence[int], *, starts_document: bool, text: str = "") -> None:
        """Append tokens to the current document, or to a new one if `starts_document`; `text` is what they encode."""
        if starts_document:
            self._offsets.write(np.int64(self._count).astype("<i8").tobytes())
            self._documents += 1
        raw = np.asarray(ids).astype(self.dtype).tobytes()
        self._tokens.write(raw)
        self._hash.update(b"document" if starts_document else b"")
        self._hash.update(raw)
        self._count += len(ids)
        self._characters += len(text)
        self._bytes += len(text) if text.isascii() else len(text.encode())

    def close(self) -> ShardFacts:
        """Write the last offset and return the facts of the shard."""
        self._offsets.write(np.int64(self._count).astype("<i8").tobytes())
        name, digest = self.dtype.name, self._hash.hexdigest()
        return ShardFacts(self._count, self._documents, self._characters, self._bytes, name, digest)


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
            tokens, offsets = (stack.enter_context(atomic_write(path)) for path in _shard_paths(folder, name))
            writers.shards[name] = ShardWriter(tokens, offsets, vocab)
        yield writers
        writers.facts.update({name: writer.close() for name, writer in writers.shards.items()})


def is_complete(folder: Path, name: str, facts: ShardFacts) -> bool:
    """Whether the files of a shard exist with the sizes that follow from `facts`."""
    tokens, offsets = _shard_paths(folder, name)
    sizes = {tokens: facts.tokens * np.dtype(facts.dtype).itemsize, offsets: (facts.documents + 1) * 8}
    return all(path.exists() and path.stat().st_size == size for path, size in sizes.items())


def open_shard(folder: Path, name: str, facts: ShardFacts) -> TokenShard:
    """Memory-map a shard that `is_complete`."""
    tokens, offsets = _shard_paths(folder, name)
    return TokenShard(_memory_map(tokens, facts.dtype), _memory_map(offsets, "int64"), facts)


def shard_units(shard: TokenShard) -> TextUnits:
    """The units that scores are relative to; every token except the first of each document is a target."""
    return TextUnits(shard.facts.tokens - shard.facts.documents, shard.facts.characters, shard.facts.bytes)


def _memory_map(path: Path, dtype: str) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _shard_paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.tokens", folder / f"{name}.offsets"
