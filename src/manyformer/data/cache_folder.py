"""Data made ready once and kept: shards and tokenizers in a cache folder, and a manifest of what they came from."""

import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.data.atomic_files import write_text
from manyformer.data.saved_tokenizers import TokenizerPair, load_tokenizers
from manyformer.data.token_shards import ShardFacts, TokenShard, is_complete, open_shard
from manyformer.errors import UserError

_FORMAT = 1
_NAME = "manifest.json"


class PreparationResult(NamedTuple):
    """What preparing gave: tokenizers, facts of each shard, a hash of each source's text, and counts to tell people."""

    tokenizers: TokenizerPair
    facts: dict[str, ShardFacts]
    hashes: dict[str, str]
    counts: dict[str, Any]


class PreparedData(NamedTuple):
    """Data ready for use."""

    tokenizers: TokenizerPair
    shards: dict[str, TokenShard]
    counts: dict[str, Any]


def load_or_prepare(cache: Path, asked: dict[str, Any], make: Callable[[], PreparationResult]) -> PreparedData:
    """What is in the cache where it was made for exactly what is `asked` now; else it is made."""
    key = hashlib.sha256(json.dumps([_FORMAT, asked], sort_keys=True).encode()).hexdigest()
    found = _read(cache, key)
    if found is None:
        # A manifest must never describe files of another making.
        (cache / _NAME).unlink(missing_ok=True)
        found = make()
        found.tokenizers.save(cache)
        _write(cache, key, asked, found)
    return _open(cache, found)


def load_prepared(cache: Path) -> PreparedData | None:
    """What was made in the cache, wherever its sources are now; None where it is missing or damaged."""
    found = _read(cache, None)
    return None if found is None else _open(cache, found)


def _open(cache: Path, made: PreparationResult) -> PreparedData:
    shards = {name: open_shard(cache, name, facts) for name, facts in made.facts.items()}
    return PreparedData(made.tokenizers, shards, made.counts)


def _write(cache: Path, key: str, asked: dict[str, Any], made: PreparationResult) -> None:
    sides = {"source": made.tokenizers.source.fingerprint, "target": made.tokenizers.target.fingerprint}
    content = {
        "format": _FORMAT,
        "key": key,
        "made from": asked,
        "python": platform.python_version(),
        "tokenizers": sides,
        "splits": {name: facts._asdict() for name, facts in made.facts.items()},
        "counts": made.counts,
        "sources": made.hashes,
    }
    write_text(cache / _NAME, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def _read(cache: Path, key: str | None) -> PreparationResult | None:
    # Whatever is missing or damaged here can be made again, so nothing is worth an error.
    try:
        content = json.loads((cache / _NAME).read_text(encoding="utf-8"))
        if key not in (None, content["key"]):
            return None
        tokenizers = load_tokenizers(cache)
        sides = {"source": tokenizers.source.fingerprint, "target": tokenizers.target.fingerprint}
        facts = {name: ShardFacts(**one) for name, one in content["splits"].items()}
        made = PreparationResult(tokenizers, facts, content["sources"], content["counts"])
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
    good = sides == content["tokenizers"] and all(is_complete(cache, name, one) for name, one in facts.items())
    return made if good else None
