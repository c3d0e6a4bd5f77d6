"""The cache of prepared data: shards and tokenizers in a folder, with a manifest of the settings behind them."""

import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.data.atomic_files import atomic_write_text
from manyformer.data.saved_tokenizers import TokenizerPair, load_tokenizers
from manyformer.data.token_shards import ShardFacts, TokenShard, is_complete, open_shard
from manyformer.errors import UserError

_FORMAT = 1
_MANIFEST = "manifest.json"


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


def load_or_prepare(cache: Path, settings: dict[str, Any], prepare: Callable[[], PreparationResult]) -> PreparedData:
    """Load the data in the cache if it was prepared with exactly these `settings`, else prepare and save it."""
    key = hashlib.sha256(json.dumps([_FORMAT, settings], sort_keys=True).encode()).hexdigest()
    result = _read_manifest(cache, key)
    if result is None:
        # A manifest must never describe files of another preparation.
        (cache / _MANIFEST).unlink(missing_ok=True)
        result = prepare()
        result.tokenizers.save(cache)
        _write_manifest(cache, key, settings, result)
    return _open_shards(cache, result)


def load_prepared(cache: Path) -> PreparedData | None:
    """Load the data in the cache without its sources; None if it is missing or damaged."""
    result = _read_manifest(cache, None)
    return None if result is None else _open_shards(cache, result)


def _open_shards(cache: Path, result: PreparationResult) -> PreparedData:
    shards = {name: open_shard(cache, name, facts) for name, facts in result.facts.items()}
    return PreparedData(result.tokenizers, shards, result.counts)


def _write_manifest(cache: Path, key: str, settings: dict[str, Any], result: PreparationResult) -> None:
    sides = {"source": result.tokenizers.source.fingerprint, "target": result.tokenizers.target.fingerprint}
    content = {
        "format": _FORMAT,
        "key": key,
        "made from": settings,
        "python": platform.python_version(),
        "tokenizers": sides,
        "splits": {name: facts._asdict() for name, facts in result.facts.items()},
        "counts": result.counts,
        "sources": result.hashes,
    }
    atomic_write_text(cache / _MANIFEST, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def _read_manifest(cache: Path, key: str | None) -> PreparationResult | None:
    # Missing or damaged files can be prepared again, so they are not an error.
    try:
        content = json.loads((cache / _MANIFEST).read_text(encoding="utf-8"))
        if key not in (None, content["key"]):
            return None
        tokenizers = load_tokenizers(cache)
        sides = {"source": tokenizers.source.fingerprint, "target": tokenizers.target.fingerprint}
        facts = {name: ShardFacts(**shard_facts) for name, shard_facts in content["splits"].items()}
        result = PreparationResult(tokenizers, facts, content["sources"], content["counts"])
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
    is_valid = sides == content["tokenizers"] and all(
        is_complete(cache, name, shard_facts) for name, shard_facts in facts.items()
    )
    return result if is_valid else None
