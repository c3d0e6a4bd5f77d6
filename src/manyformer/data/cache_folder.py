"""The cache of prepared data: shards and tokenizers in a folder, with the settings behind them and a manifest."""

import hashlib
import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from manyformer.data.saved_tokenizers import TokenizerPair, load_tokenizers
from manyformer.data.token_shards import ShardFacts, TokenShard, open_verified_shard
from manyformer.errors import UserError
from manyformer.files.atomic_files import draft_path
from manyformer.files.json_records import AS_OBJECT, Count, DamagedFile, FileName, FileRecord, Sha256
from manyformer.files.verified_folder import MANIFEST, VerifiedFolder, write_manifest
from manyformer.type_aliases import LogFn

RECORD_FILE = "prepared.json"


class PreparedRecord(FileRecord):
    """How the data in a folder was prepared: `key` is a hash of `made_from`, the settings and the sources."""

    title = "the description of prepared data"
    format_number = 2
    key: Sha256
    made_from: dict[str, Any]
    python: str
    tokenizers: str
    """The fingerprint of the tokenizers and labels."""
    splits: dict[FileName, Annotated[ShardFacts, AS_OBJECT]]
    counts: dict[str, bool | Count | dict[str, Count]]
    sources: dict[str, str]


class PreparationResult(NamedTuple):
    """The result of preparing data: tokenizers, facts of each shard, a hash of each source, and counts to display."""

    tokenizers: TokenizerPair
    facts: dict[str, ShardFacts]
    hashes: dict[str, str]
    counts: dict[str, Any]


class PreparedData(NamedTuple):
    """Prepared data: tokenizers, memory-mapped shards, and counts to display."""

    tokenizers: TokenizerPair
    shards: dict[str, TokenShard]
    counts: dict[str, Any]


def load_or_prepare(
    cache: Path,
    settings: dict[str, Any],
    prepare: Callable[[Path], PreparationResult],
    *,
    belongs_to_model: bool,
    log: LogFn,
) -> PreparedData:
    """Load the data in the cache if it was prepared with exactly these `settings`, else prepare it in a new folder.

    The new files replace those of the cache when they are complete. If the cache `belongs_to_model`, which was trained
    on its data, data that differs is refused with a UserError, and the cache stays as it is. Damaged files are named in
    the log and prepared again.
    """
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    previous: PreparedRecord | None = None
    try:
        previous = read_record(cache)
        if previous is not None and previous.key == key:
            return _open(cache, previous)
    except DamagedFile as damage:
        log(f"{damage}; preparing the data again")
    draft = draft_path(cache / "prepared")
    try:
        draft.mkdir(parents=True)
        result = prepare(draft)
        fingerprint = result.tokenizers.fingerprint
        if belongs_to_model and previous and (previous.splits, previous.tokenizers) != (result.facts, fingerprint):
            raise UserError(
                "the data differs from what this run was trained on (in its text, tokenizer or splits); restore the "
                "previous data, or start a new run"
            )
        result.tokenizers.save(draft)
        record = PreparedRecord(
            key=key,
            made_from=settings,
            python=platform.python_version(),
            tokenizers=fingerprint,
            splits=result.facts,
            counts=result.counts,
            sources=result.hashes,
        )
        record.write(draft / RECORD_FILE)
        write_manifest(draft)
        _replace_files(cache, draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return _open(cache, record)


def load_prepared(cache: Path) -> PreparedData | None:
    """Load the data in the cache without its sources; None if there is none. Raises DamagedFile."""
    record = read_record(cache)
    return None if record is None else _open(cache, record)


def read_record(cache: Path) -> PreparedRecord | None:
    """How the data in the cache was prepared; None if there is none. Raises DamagedFile."""
    if not (cache / MANIFEST).exists():
        return None
    return PreparedRecord.read(VerifiedFolder.open(cache).file(RECORD_FILE))


def _replace_files(cache: Path, draft: Path) -> None:
    """Move the files of the draft into the cache. The manifest comes last: it never describes files of another one."""
    (cache / MANIFEST).unlink(missing_ok=True)
    for file in sorted(draft.iterdir(), key=lambda file: file.name == MANIFEST):
        file.replace(cache / file.name)


def _open(cache: Path, record: PreparedRecord) -> PreparedData:
    files, tokenizers = VerifiedFolder.open(cache), load_tokenizers(cache)
    if tokenizers.fingerprint != record.tokenizers:
        raise DamagedFile(f"{cache / RECORD_FILE} is damaged: the tokenizers beside it are others than those it names")
    shards = {name: open_verified_shard(files, name, facts) for name, facts in record.splits.items()}
    return PreparedData(tokenizers, shards, record.counts)
