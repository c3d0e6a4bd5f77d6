"""The steps of preparing text: a survey of the sources, the division into splits, and tokenized shards.

Results are saved from time to time, so that a preparation that was killed continues where it was."""

import hashlib
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from manyformer.base import VERSION
from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import (
    NotWritable,
    atomic_write_bytes,
    make_folder,
    open_in_place,
    report_disk_full,
)
from manyformer.base.files.json_records import AS_OBJECT, Count, DamagedFile, FileName, FileRecord, Sha256
from manyformer.data.batching.epochs import FIXED_SEED, random_generator
from manyformer.data.storage.token_shards import ShardFacts, ShardWriter, shard_paths
from manyformer.data.text.text_sources import TextPart, TextSource
from manyformer.data.tokenizers.saved_tokenizers import load_tokenizer
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.nn.runtime.exact_shares import ceil_share, exact_share, floor_share

# With fewer documents, one document is too large a share to hold out.
MIN_DOCUMENTS = 10
SAVE_SECONDS = 20.0
"""The time between two savings of the progress: what a kill costs at most, besides reading the text again."""


class DocumentPiece(NamedTuple):
    """A part of a document with its split ("train", "valid", "test")."""

    split: str
    part: TextPart


class TextSurvey(NamedTuple):
    """Results of a first pass over the text: the characters of each document, and a hash of each source's text."""

    lengths: NDArray[np.int64]
    hashes: dict[str, str]


def survey_sources(sources: Iterable[TextSource]) -> TextSurvey:
    """Survey all sources in one pass, which also raises for wrong encodings and missing columns before preparation."""
    # 8 bytes a document, where a list of numbers would take several times as much
    lengths = array("q")
    hashes = {}
    for source in sources:
        hasher = hashlib.sha256()
        for part in source.parts():
            if part.starts_document:
                lengths.append(0)
            # a long document comes in parts
            lengths[-1] += len(part.text)
            hasher.update(part.text.encode())
        hashes[source.name] = hasher.hexdigest()
    return TextSurvey(np.array(lengths, dtype=np.int64), hashes)


class HoldoutSplitter:
    """Assigns documents of the given lengths to splits; `shares` maps held-out splits to fractions of characters."""

    def __init__(self, lengths: NDArray[np.int64], shares: dict[str, float]) -> None:
        assert sum(shares.values()) < 1
        self._lengths = lengths
        self._shares = shares
        self.names = ["train", *shares]
        self._split_of_document = self._assign_splits()
        # documents may be so unequal that a split got none of them
        none_empty = len(set(self._split_of_document.tolist())) == len(self.names)
        self.by_document = not shares or (none_empty and len(lengths) >= MIN_DOCUMENTS)

    def _assign_splits(self) -> NDArray[np.int8]:
        splits = np.zeros(len(self._lengths), np.int8)
        # a fixed seed, so that all runs hold out the same documents and can be compared
        order = random_generator(FIXED_SEED).permutation(len(self._lengths))
        total = int(self._lengths.sum())
        for number, share in enumerate(self._shares.values(), start=1):
            candidates = order[splits[order] == 0]
            # a document larger than the share remains in training
            # lengths are integers: what is below the share is below its next integer
            limit = floor_share(share, total)
            candidates = candidates[self._lengths[candidates] <= limit]
            # documents in a random order, until their characters reach the share
            preceding = np.cumsum(self._lengths[candidates]) - self._lengths[candidates]
            splits[candidates[preceding < ceil_share(share, total)]] = number
        return splits

    def divide(self, parts: Iterable[TextPart]) -> Iterator[DocumentPiece]:
        """Stream each part with its split; a part that contains a split boundary is divided there."""
        document = -1
        offset = 0
        for part in parts:
            if part.starts_document:
                document = document + 1
                offset = 0
            if self.by_document:
                yield DocumentPiece(self.names[self._split_of_document[document]], part)
            else:
                yield from self._divide_part(part, offset, int(self._lengths[document]))
            offset += len(part.text)

    def _divide_part(self, part: TextPart, offset: int, length: int) -> Iterator[DocumentPiece]:
        # No side of a boundary ends the document, but the first part of a split in a document starts one.
        train_share = 1 - sum(map(exact_share, self._shares.values()))
        split_start = 0
        for name, share in zip(self.names, [train_share, *self._shares.values()], strict=True):
            if name == self.names[-1]:
                split_stop = length
            else:
                split_stop = split_start + floor_share(share, length)
            start = max(split_start, offset)
            stop = min(split_stop, offset + len(part.text))
            if start < stop:
                yield DocumentPiece(
                    name,
                    TextPart(
                        part.text[start - offset : stop - offset],
                        starts_document=start == split_start,
                        ends_document=False,
                    ),
                )
            split_start = split_stop


class SurveyRecord(FileRecord):
    """A survey of the first sources of a split; the lengths of their documents are in a file of their own."""

    title = "the survey of a text"
    hashes: dict[str, str]
    sources: Count
    lengths_sha256: Sha256


class ProgressRecord(FileRecord):
    """The number of pieces of the text that are in the shards, and the facts of the shards."""

    title = "the progress of preparing a text"
    version: str
    tokenizer: str
    """The fingerprint of the tokenizer."""
    pieces: Count
    shards: dict[FileName, Annotated[ShardFacts, AS_OBJECT]]


@final
class UnfinishedText:
    """The intermediate results in the folder of a preparation; those that are missing or damaged are made again.

    The folder belongs to one set of sources and settings. The results are in its hidden folder `.progress`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # hidden: what is not hidden is moved into the cache when the preparation is complete
        self._progress = folder / ".progress"
        make_folder(self._progress)

    def survey(self, split: str, sources: Sequence[TextSource]) -> TextSurvey:
        """The survey of the sources of a split, saved from time to time between two sources."""
        saved_lengths, hashes, saved_sources = self._saved_survey(split)
        lengths = array("q", saved_lengths)
        last_save = time.monotonic()
        for number, source in enumerate(sources[saved_sources:], start=saved_sources + 1):
            # one source at a time: results can be saved between two of them
            survey = survey_sources([source])
            lengths.frombytes(survey.lengths.tobytes())
            hashes |= survey.hashes
            if number == len(sources) or time.monotonic() - last_save >= SAVE_SECONDS:
                self._save_survey(split, lengths.tobytes(), hashes, number)
                last_save = time.monotonic()
        return TextSurvey(np.array(lengths, dtype=np.int64), hashes)

    def _saved_survey(self, split: str) -> tuple[bytes, dict[str, str], int]:
        """The saved survey of a split: the lengths, the hashes and the number of its first sources."""
        record_path, lengths_path = self._survey_files(split)
        with suppress(UserError, OSError):
            record = SurveyRecord.read(record_path)
            lengths = lengths_path.read_bytes()
            # the two files are written one after the other, and a kill may come between them
            if hashlib.sha256(lengths).hexdigest() == record.lengths_sha256:
                return lengths, record.hashes, record.sources
        return b"", {}, 0

    def _save_survey(self, split: str, lengths: bytes, hashes: dict[str, str], sources: int) -> None:
        record_path, lengths_path = self._survey_files(split)
        digest = hashlib.sha256(lengths).hexdigest()
        atomic_write_bytes(lengths_path, lengths)
        SurveyRecord(hashes=hashes, sources=sources, lengths_sha256=digest).write(record_path)

    def _survey_files(self, split: str) -> tuple[Path, Path]:
        return self._progress / f"{split}.survey.json", self._progress / f"{split}.lengths"

    def tokenizer(self, learn: Callable[[], Tokenizer]) -> Tokenizer:
        """The tokenizer, which `learn` returns if there is none yet."""
        path = self._progress / "tokenizer.json"
        with suppress(DamagedFile):
            return load_tokenizer(path)
        tokenizer = learn()
        tokenizer.save(path)
        return tokenizer

    @contextmanager
    def shards(self, names: Sequence[str], tokenizer: Tokenizer) -> Iterator["UnfinishedShards"]:
        """Open the shards with these names for writing, after the pieces that they hold; complete when it succeeds."""
        path = self._progress / "shards.json"
        record = _read_progress(path, tokenizer.fingerprint)
        with ExitStack() as stack, report_disk_full(self.folder):
            try:
                shards = _open_shards(stack, self.folder, names, tokenizer, path, record)
            # what cannot be continued is begun again: it costs time, and nothing else
            except (DamagedFile, NotWritable, OSError):
                shards = _open_shards(stack, self.folder, names, tokenizer, path, None)
            yield shards
            shards.close()


@final
class UnfinishedShards:
    """Shards that are being written: `pieces` of the text are in them, and `facts` are theirs when it is complete."""

    def __init__(self, writers: dict[str, ShardWriter], pieces: int, fingerprint: str, path: Path) -> None:
        self.writers = writers
        self.pieces = pieces
        self._fingerprint = fingerprint
        self._path = path
        self.facts: dict[str, ShardFacts] = {}
        self._last_save = time.monotonic()

    @property
    def characters(self) -> int:
        """The characters of the text in the shards."""
        return sum(writer.facts().characters for writer in self.writers.values())

    def advance(self, count: int) -> None:
        """Note that `count` more pieces are in the shards, and save the progress from time to time."""
        self.pieces += count
        if time.monotonic() - self._last_save < SAVE_SECONDS:
            return
        for writer in self.writers.values():
            # the record must not be on disk earlier than the tokens that it counts
            writer.sync()
        shards = {name: writer.facts() for name, writer in self.writers.items()}
        ProgressRecord(version=VERSION, tokenizer=self._fingerprint, pieces=self.pieces, shards=shards).write(
            self._path
        )
        self._last_save = time.monotonic()

    def close(self) -> None:
        """Complete all shards."""
        self.facts = {name: writer.close() for name, writer in self.writers.items()}


def _read_progress(path: Path, fingerprint: str) -> ProgressRecord | None:
    """The saved progress, None if there is none of this tokenizer and version; another may divide text otherwise."""
    try:
        record = ProgressRecord.read(path) if path.exists() else None
    except UserError:
        return None
    if record and (record.version, record.tokenizer) == (VERSION, fingerprint):
        return record
    return None


def _open_shards(
    stack: ExitStack,
    folder: Path,
    names: Sequence[str],
    tokenizer: Tokenizer,
    path: Path,
    record: ProgressRecord | None,
) -> UnfinishedShards:
    """The shards as `record` describes them, empty without it. Raises DamagedFile if they differ from it."""
    writers: dict[str, ShardWriter] = {}
    for name in names:
        files = shard_paths(folder, name)
        if record is None:
            for file in files:
                open_in_place(file, empty=True).close()
        tokens, offsets = (stack.enter_context(open_in_place(file)) for file in files)
        writers[name] = ShardWriter(tokens, offsets, tokenizer.vocab)
        if record is not None:
            writers[name].resume(record.shards[name])
    return UnfinishedShards(writers, record.pieces if record else 0, tokenizer.fingerprint, path)
