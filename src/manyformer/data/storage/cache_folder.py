"""The cache of prepared data: shards and tokenizers in a folder, with the settings behind them and a manifest."""

import fcntl
import hashlib
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import NotWritable, make_folder, remove_draft, report_not_written
from manyformer.base.files.json_records import AS_OBJECT, Count, DamagedFile, FileName, FileRecord, Sha256
from manyformer.base.files.json_text import json_text
from manyformer.base.files.verified_folder import MANIFEST, VerifiedFolder, write_manifest
from manyformer.base.type_aliases import LogFn
from manyformer.data.pipeline.summary import DataSummary
from manyformer.data.storage.content_sums import changed_contents, without_sums
from manyformer.data.storage.token_shards import ShardFacts, TokenShard, open_verified_shard
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, load_tokenizers

RECORD_FILE = "prepared.json"
LOCK_FILE = ".lock"
_UNFINISHED = ".unfinished-"


class PreparedRecord(FileRecord):
    """The record of a preparation: `key` is a hash of `made_from`, the settings and the sources.

    The sums of sources' contents are no part of the key: files that earlier versions prepared have none."""

    title = "the description of prepared data"
    format_number = 2
    key: Sha256
    made_from: dict[str, Any]
    python: str
    tokenizers: str
    """The fingerprint of the tokenizers and labels."""
    splits: dict[FileName, Annotated[ShardFacts, AS_OBJECT]]
    counts: dict[str, bool | Count | dict[str, Count] | dict[str, str]]
    sources: dict[str, str]
    summary: Annotated[DataSummary, AS_OBJECT] | None = None
    """None for kinds of data without one, and for files of earlier versions."""


class PreparationResult(NamedTuple):
    """The result of preparing data: tokenizers, facts of each shard, a hash of each source, and counts to display.

    `summary` is what a person can check of it."""

    tokenizers: TokenizerPair
    facts: dict[str, ShardFacts]
    hashes: dict[str, str]
    counts: dict[str, Any]
    summary: DataSummary | None = None


class PreparedData(NamedTuple):
    """Prepared data: tokenizers, memory-mapped shards, counts to display, the hashes of sources, and the summary."""

    tokenizers: TokenizerPair
    shards: dict[str, TokenShard]
    counts: dict[str, Any]
    hashes: dict[str, str]
    summary: DataSummary | None = None


def load_or_prepare(
    cache: Path,
    settings: dict[str, Any],
    prepare: Callable[[Path], PreparationResult],
    *,
    belongs_to_model: bool,
    log: LogFn,
    resumes: bool = False,
) -> PreparedData:
    """Load the data in the cache if it was prepared with exactly these `settings`, else prepare it in a new folder.

    The new files replace those of the cache when they are complete. With `resumes`, `prepare` gets the folder of an
    earlier preparation with these settings that was killed or interrupted, as it is. If the cache `belongs_to_model`,
    which was trained on its data, data that differs is refused with a UserError, and the cache stays as it is. Damaged
    files are named in the log and prepared again. A process waits while another one prepares data in the same cache.
    """
    # sampled sums are compared apart from the key: files of earlier versions have none
    key = hashlib.sha256(json_text(without_sums(settings), sort_keys=True, ensure_ascii=True).encode()).hexdigest()
    with suppress(DamagedFile):
        # without the lock first: data is mostly current, and a cache that is read-only cannot be locked
        if (prepared := _load_if_current(cache, key, settings)) is not None:
            _remove_rest(cache, key)
            return prepared
    with _locked(cache):
        # another process may have prepared the data meanwhile
        try:
            if (prepared := _load_if_current(cache, key, settings, log)) is not None:
                return prepared
        except DamagedFile as damage:
            log(f"{damage}; preparing the data again")
        with _unfinished_folder(cache, key, resumes=resumes) as folder:
            # in a folder of its own, so that a failure leaves the data in the cache as it was
            result = prepare(folder)
            # compared before files are replaced: data of a trained model is never overwritten by other data
            if belongs_to_model:
                _check_same(cache, result)
            _complete(folder, key, settings, result)
            _replace_files(cache, folder)
        return _open(cache, PreparedRecord.read(cache / RECORD_FILE))


def load_prepared(cache: Path) -> PreparedData | None:
    """Load the data in the cache without its sources; None if there is none. Raises DamagedFile."""
    record = read_record(cache)
    if record is None:
        return None
    return _open(cache, record)


def read_record(cache: Path) -> PreparedRecord | None:
    """The record of how the data in the cache was prepared; None if there is none. Raises DamagedFile."""
    if not (cache / MANIFEST).exists():
        return None
    return PreparedRecord.read(VerifiedFolder.open(cache).file(RECORD_FILE))


@contextmanager
def _locked(cache: Path, *, waits: bool = True) -> Iterator[None]:
    """Wait until no other process prepares data in the cache; the lock ends with its process, also if it is killed.

    Without `waits`, raises BlockingIOError where another process does."""
    with report_not_written(cache / LOCK_FILE):
        lock = (cache / LOCK_FILE).open("ab")
    with lock as file:
        fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _remove_rest(cache: Path, key: str) -> None:
    """Remove the folder of the preparation that made the data in the cache, if a kill came before it had removed it."""
    folder = _folder_of(cache, key)
    if folder.exists():
        # a process that prepares the data anew removes it by itself; in a cache that is read-only the data is as good
        with suppress(NotWritable, BlockingIOError), _locked(cache, waits=False):
            remove_draft(folder)


def _folder_of(cache: Path, key: str) -> Path:
    """The folder in which data with this key is prepared."""
    return cache / f"{_UNFINISHED}{key[:16]}"


@contextmanager
def _unfinished_folder(cache: Path, key: str, *, resumes: bool) -> Iterator[Path]:
    """The folder of a preparation, which stays if the block is interrupted and is removed if it ends or fails."""
    folder = _folder_of(cache, key)
    for draft in cache.glob(f"{_UNFINISHED}*"):
        if not resumes or draft != folder:
            remove_draft(draft)
    make_folder(folder)
    try:
        yield folder
    # not for KeyboardInterrupt: an interrupted preparation goes on later
    except Exception:
        remove_draft(folder)
        raise
    remove_draft(folder)


def _check_same(cache: Path, result: PreparationResult) -> None:
    """Raise UserError if the data in the cache, which a model was trained on, is other data than the result."""
    previous = None
    with suppress(DamagedFile):
        previous = read_record(cache)
    if previous is None:
        return
    names = sorted({*previous.splits, *result.facts})
    differing = [name for name in names if previous.splits.get(name) != result.facts.get(name)]
    if previous.tokenizers != result.tokenizers.fingerprint:
        differing.append("the tokenizer")
    if differing:
        raise UserError(
            f"the data differs from what this run was trained on (data.path: {', '.join(differing)}); restore the "
            "previous data, or start a new run"
        )


def _complete(folder: Path, key: str, settings: dict[str, Any], result: PreparationResult) -> None:
    """Write the tokenizers, the description and the manifest to the folder of a preparation."""
    result.tokenizers.save(folder)
    PreparedRecord(
        key=key,
        made_from=settings,
        python=platform.python_version(),
        tokenizers=result.tokenizers.fingerprint,
        splits=result.facts,
        counts=result.counts,
        sources=result.hashes,
        summary=result.summary,
    ).write(folder / RECORD_FILE)
    write_manifest(folder)


def _replace_files(cache: Path, folder: Path) -> None:
    """Move the files into the cache. The manifest comes last: it never describes files of another preparation."""
    # without a manifest the cache counts as empty, also if the process is killed between two files
    (cache / MANIFEST).unlink(missing_ok=True)
    files = [file for file in folder.iterdir() if not file.name.startswith(".")]
    for file in sorted(files, key=lambda file: file.name == MANIFEST):
        with report_not_written(cache / file.name):
            file.replace(cache / file.name)


def _load_if_current(cache: Path, key: str, settings: dict[str, Any], log: LogFn | None = None) -> PreparedData | None:
    """The data in the cache if its settings have this key, and the sampled content of its sources is the same.

    The log names sources with other content. Raises DamagedFile."""
    record = read_record(cache)
    if record is None or record.key != key:
        return None
    if changed := changed_contents(record.made_from, settings):
        if log is not None:
            others = ""
            if len(changed) > 1:
                others = f" (and {len(changed) - 1:,} more)"
            log(
                f"{changed[0]}{others}: the content has changed since it was prepared, though sizes and modification "
                "times have not; preparing the data again"
            )
        return None
    return _open(cache, record)


def _open(cache: Path, record: PreparedRecord) -> PreparedData:
    files = VerifiedFolder.open(cache)
    tokenizers = load_tokenizers(cache)
    if tokenizers.fingerprint != record.tokenizers:
        raise DamagedFile(f"{cache / RECORD_FILE} is damaged: the tokenizers beside it are others than those it names")
    shards = {name: open_verified_shard(files, name, facts) for name, facts in record.splits.items()}
    for name in record.sources:
        # arrays are kept in a file that has the name of what they were read from
        if name in files:
            files.file(name)
    return PreparedData(tokenizers, shards, record.counts, record.sources, record.summary)
